"""The options of generate.py and its prompts. This module imports no torch, so mistakes are reported at once."""

import argparse
import re
import sys
from pathlib import Path

from gpt.console import Parser
from gpt.data.chunking import decode_argument, decode_stream, strip_byte_order_mark
from gpt.errors import UserError, require_range
from gpt.files import expand_path, user_errors

OPTION_RANGES = {
    "max_new_tokens": (1, 10**7),
    "num_samples": (1, 10**4),
    "top_logprobs": (0, 100),
    "seed": (0, 2**63 - 1),
}
ESCAPES = str.maketrans("ntr", "\n\t\r")


def parse_arguments(arguments: list[str] | None, args: argparse.Namespace | None = None) -> argparse.Namespace:
    """Parse options, with every check that needs no model. `args` holds the values of options not in `arguments`."""
    parser = Parser("python generate.py", "Continue a prompt with a trained model.")
    group = parser.add_argument_group("prompt (default: standard input, or on a terminal a new document)")
    add = group.add_mutually_exclusive_group().add_argument
    add("--prompt", metavar="TEXT", action="append", help="repeat it to continue several at once (default: none)")
    prompt_file = "a UTF-8 file; one newline at its end is dropped (default: none)"
    add("--prompt-file", metavar="FILE", type=expand_path, help=prompt_file)
    add("--interactive", action="store_true", help="ask for prompts until Ctrl-D (default: off)")
    context = "continue the text so far; an empty line starts a new document (default: off)"
    group.add_argument("--keep-context", action="store_true", help=f"with --interactive: {context}")
    add = parser.add_argument_group("model").add_argument
    add("--checkpoint", metavar="PATH", help="a run, checkpoint, Hugging Face GPT-2 or hub name (default: newest run)")
    add("--device", default="auto", help="auto, cpu, cuda or mps (default: auto)")
    precision = "auto uses bf16 or fp16 where that is faster (default: auto)"
    add("--precision", default="auto", choices=["auto", "fp32", "bf16", "fp16", "int8"], help=precision)
    compiled = "for one text on a CPU: faster, with a C compiler such as gcc (default: off)"
    add("--compile", action="store_true", help=compiled)
    add = parser.add_argument_group("text").add_argument
    add("--max-new-tokens", metavar="N", type=int, default=300, help="default: 300")
    add("--num-samples", metavar="N", type=int, default=1, help="continuations of each prompt (default: 1)")
    stop = r"end before this text, where \n, \t, \r and \\ are escapes; repeatable (default: none)"
    add("--stop", metavar="TEXT", action="append", default=[], type=unescape, help=stop)
    add("--seed", metavar="N", type=int, help="the same seed gives the same text (default: a new one each time)")
    add("--slide", metavar="N", type=int, default=1, help="tokens to drop whenever the context is full (default: 1)")
    add("--json", action="store_true", help="print one JSON object instead of the text (default: off)")
    check = "also show which passages occur word for word in the training text (default: off)"
    add("--check", action="store_true", help=check)
    page = "also write a web page that shows why the model chose each token (default: off)"
    add("--insight", metavar="PAGE.html", type=expand_path, help=page)
    top = "show the probability of each new token and of the N likeliest, before the filters below (default: off)"
    add("--top-logprobs", metavar="N", type=int, help=top)
    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", metavar="X", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)")
    add("--top-k", metavar="N", type=int, default=0, help="keep the N likeliest tokens; 0 is off (default: 0)")
    add("--top-p", metavar="X", type=float, default=0.95, help="keep the likeliest that sum to X (default: 0.95)")
    add("--min-p", metavar="X", type=float, default=0.0, help="drop tokens below X times the likeliest (default: 0)")
    add("--repetition-penalty", metavar="X", type=float, default=1.0, help="above 1 repeats less (default: 1)")
    args = parser.parse_args(arguments, args)
    for name, limits in OPTION_RANGES.items():
        value = getattr(args, name)
        if value is not None:
            require_range(f"--{name.replace('_', '-')}", value, *limits)
    if args.interactive + args.json + bool(args.check or args.insight) > 1:
        raise UserError("--interactive, --json, and --check or --insight exclude each other: give one of them")
    if args.keep_context and not (args.interactive and args.num_samples == 1):
        raise UserError("--keep-context is for one text with --interactive: give that option and no --num-samples")
    if (args.insight or args.compile) and (args.num_samples > 1 or len(args.prompt or "1") > 1):
        raise UserError("--insight and --compile are for a single text: give one prompt, and no --num-samples")
    if args.insight and (args.insight.is_dir() or not args.insight.parent.is_dir()):
        raise UserError(f"--insight={args.insight} cannot be written: name a file in a folder that exists")
    return args


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Return the prompts of the command line. Without any, return the one in a file or on standard input."""
    if args.prompt is not None:
        return [decode_argument(prompt) for prompt in args.prompt]
    source = args.prompt_file or Path("standard input")
    with user_errors(source), args.prompt_file.open("rb") if args.prompt_file else sys.stdin.buffer as stream:
        content = b"" if stream.isatty() else stream.read()
    prompt = "".join(strip_byte_order_mark(decode_stream([content], str(source))))
    return [prompt.replace("\r\n", "\n").removesuffix("\n")]


def unescape(text: str) -> str:
    r"""Replace the escapes \n, \t, \r and \\. Any other backslash stays."""
    return re.sub(r"\\([ntr\\])", lambda match: match[1].translate(ESCAPES), decode_argument(text))
