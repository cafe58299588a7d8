"""Sample text from a trained model: python generate.py --prompt "..." """

import argparse
import codecs
import collections
import functools
import io
import itertools
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt.errors import Parser, UserError, command_line, write_line
from gpt.text.pieces import visible, well_formed

if TYPE_CHECKING:  # torch takes seconds to import; `main` imports it once the arguments have proved right
    from gpt.sampling.language_model import Continuation, LanguageModel, TokenLogprob
    from gpt.text.shards import Shards
    from gpt.text.tokenizer import Tokenizer

    ContinueTexts = Callable[[list[list[int]]], Iterator[list[Continuation]]]

LONGEST_PROMPT = 32_000_000  # bytes; a model sees some thousand
ESCAPES = str.maketrans("ntr", "\n\t\r")


def main(arguments: list[str] | None = None) -> None:
    """Sample as the command line says."""
    args = parse_arguments(arguments)
    from gpt.hardware import explained
    from gpt.threads import giving_way

    with explained("lower --num-samples, --max-new-tokens or --precision"), giving_way():
        sample(args)


def sample(args: argparse.Namespace) -> None:
    """Load a model, read the prompts, and print how the model continues them."""
    import torch

    from gpt.exchange.opening import find_checkpoint, open_with_record
    from gpt.hardware import choose_device, choose_precision
    from gpt.sampling.compiled import require_compilable
    from gpt.sampling.generation import Sampling
    from gpt.sampling.language_model import LanguageModel
    from gpt.sampling.packed import choose_sampling_precision, pack_weights

    sampling = Sampling(args.repetition_penalty, args.temperature, args.top_k, args.top_p, args.min_p)
    device = choose_device(args.device)
    prompts = [] if args.interactive else [prompt for prompt in read_prompts(args) for _ in range(args.num_samples)]
    rows = len(prompts) or args.num_samples

    path = find_checkpoint(args.checkpoint)
    model, tokenizer, record = open_with_record(path)
    sources = training_text(path, tokenizer, record) if args.check else []
    if args.slide > (context := model.config.context_length):
        raise UserError(f"--slide={args.slide} is out of range: it must be at most the model's context, {context}")
    precision = choose_sampling_precision(args.precision, model.to(device), choose_precision("auto", device))
    if args.compile:
        require_compilable(rows)
    pack_weights(model, precision, rows, args.compile)

    seed = args.seed if args.seed is not None else torch.Generator().seed() >> 33  # short enough to type
    generator = torch.Generator(device).manual_seed(seed)
    write_line(f"generate.py: sampling {path} with seed {seed}", sys.stderr)
    language_model = LanguageModel(model, tokenizer)
    continue_texts: ContinueTexts = functools.partial(
        language_model.continue_texts,
        max_new_tokens=args.max_new_tokens,
        sampling=sampling,
        generator=generator,
        slide=args.slide,
        stops=tuple(args.stop),
        top_logprobs=args.top_logprobs,
    )
    encode = functools.cache(functools.partial(encode_prompt, language_model))
    if args.interactive:
        interact(continue_texts, tokenizer.encode if args.keep_context else encode, args.num_samples, args.keep_context)
        return
    steps = continue_texts([encode(prompt) for prompt in prompts])
    if args.json:
        print_json(prompts, steps, {"checkpoint": str(path), "seed": seed, "sampling": vars(sampling)})
    elif len(prompts) == 1:
        print(prompts[0], end="", flush=True)
        (text,) = collections.deque(print_growing(steps), maxlen=1)
        print(copied(text.tokens, sources), end="")
        if args.insight:
            ids = encode(prompts[0]) or [tokenizer.end_of_text]
            facts = {"checkpoint": str(path), "seed": seed} | vars(sampling)
            write_insight(args.insight, language_model, ids + text.tokens, len(ids), sampling, facts)
    else:
        (texts,) = collections.deque(steps, maxlen=1)
        for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True), start=1):
            print(f"--- {number} of {len(prompts)} ---\n{prompt}{printable(text)}")
            print(copied(text.tokens, sources), end="")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line, and check whatever can be checked before a model is loaded."""
    parser = Parser("python generate.py", "Continue a prompt with a trained model.")
    add = parser.add_argument_group("prompt (default: standard input, or on a terminal a new document)").add_argument
    add("--prompt", metavar="TEXT", action="append", help="repeat it to continue several at once (default: none)")
    add("--prompt-file", metavar="FILE", type=Path, help="a UTF-8 file, less one newline at its end (default: none)")
    add("--interactive", action="store_true", help="ask for prompts until Ctrl-D (default: off)")
    kept = "continue what was said so far; an empty line starts a new document (default: off)"
    add("--keep-context", action="store_true", help=f"with --interactive: {kept}")
    add = parser.add_argument_group("model").add_argument
    add("--checkpoint", metavar="PATH", help="a run, checkpoint, Hugging Face GPT-2 or hub name (default: newest run)")
    add("--device", default="auto", help="auto, cpu, cuda or mps (default: auto)")
    precision = "auto takes bf16 or fp16 where it is faster (default: auto)"
    add("--precision", default="auto", choices=["auto", "fp32", "bf16", "fp16", "int8"], help=precision)
    compiled = "for one long text: takes seconds to start, then faster (default: off)"
    add("--compile", action="store_true", help=compiled)
    add = parser.add_argument_group("text").add_argument
    add("--max-new-tokens", metavar="N", type=int, default=300, help="default: 300")
    add("--num-samples", metavar="N", type=int, default=1, help="continuations of each prompt (default: 1)")
    stop = r"end before this text, where \n, \t, \r and \\ are escapes; repeatable (default: none)"
    add("--stop", metavar="TEXT", action="append", default=[], type=unescaped, help=stop)
    add("--seed", metavar="N", type=int, help="the same seed gives the same text (default: a new one each time)")
    add("--slide", metavar="N", type=int, default=1, help="tokens to drop whenever the context is full (default: 1)")
    add("--json", action="store_true", help="print one JSON object instead of the text (default: off)")
    check = "also show which passages stand verbatim in the training text (default: off)"
    add("--check", action="store_true", help=check)
    page = "also write a page that shows why the model chose each token, for a browser (default: off)"
    add("--insight", metavar="PAGE.html", type=Path, help=page)
    top = "show each new token's probability and the N likeliest; the filters below do not count (default: off)"
    add("--top-logprobs", metavar="N", type=int, help=top)
    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", metavar="X", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)")
    add("--top-k", metavar="N", type=int, default=0, help="keep the N likeliest tokens; 0 is off (default: 0)")
    add("--top-p", metavar="X", type=float, default=0.95, help="keep the likeliest that sum to X (default: 0.95)")
    add("--min-p", metavar="X", type=float, default=0.0, help="drop tokens below X times the likeliest (default: 0)")
    add("--repetition-penalty", metavar="X", type=float, default=1.0, help="above 1 repeats less (default: 1)")
    args = parser.parse_args(arguments)
    for name, most in (("max_new_tokens", 10_000_000), ("num_samples", 10_000), ("slide", 1_000_000)):
        if not 1 <= (value := getattr(args, name)) <= most:
            limits = f"at least 1 and at most {most}"
            raise UserError(f"--{name.replace('_', '-')}={value} is out of range: it must be {limits}")
    if args.top_logprobs is not None and not 0 <= args.top_logprobs <= 100:
        raise UserError(f"--top-logprobs={args.top_logprobs} is out of range: it must be at least 0 and at most 100")
    if args.seed is not None and not 0 <= args.seed < 1 << 63:
        raise UserError(f"--seed={args.seed} is out of range: it must be at least 0 and below 2^63")
    if "" in args.stop:
        raise UserError("--stop='' would end every text before it begins: give at least one character")
    if sum([args.prompt is not None, args.prompt_file is not None, args.interactive]) > 1:
        raise UserError("--prompt, --prompt-file and --interactive exclude each other: give one of them")
    if args.interactive and args.json:
        raise UserError("--interactive and --json exclude each other: give one of them")
    if args.keep_context and not (args.interactive and args.num_samples == 1):
        raise UserError("--keep-context is for one text with --interactive: give that option and no --num-samples")
    if args.check and (args.interactive or args.json):
        raise UserError("--check goes with neither --interactive nor --json: leave them out")
    if args.insight and (args.interactive or args.json or args.num_samples > 1 or len(args.prompt or "1") > 1):
        raise UserError("--insight shows one text: give it one prompt, and no --num-samples, --interactive or --json")
    if args.insight and (args.insight.is_dir() or not args.insight.parent.is_dir()):
        raise UserError(f"--insight={args.insight} cannot be written: name a file in a folder that exists")
    return args


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Return the prompts of the command line, or else the one in a file or on standard input."""
    if args.prompt is not None:
        return [well_formed(prompt) for prompt in args.prompt]
    if args.prompt_file is not None:
        source = str(args.prompt_file)
        try:
            with args.prompt_file.open("rb") as stream:
                content = stream.read(LONGEST_PROMPT + 1)
        except OSError as error:
            raise UserError(f"{source}: cannot be read ({error.strerror})") from None
    else:
        source = "standard input"
        content = b"" if sys.stdin.isatty() else sys.stdin.buffer.read(LONGEST_PROMPT + 1)
    if len(content) > LONGEST_PROMPT:
        raise UserError(
            f"{source}: a prompt has at most {LONGEST_PROMPT:,} bytes, and a model sees only its end: cut it"
        )
    try:
        return [re.sub(r"\r?\n\Z", "", content.decode("utf-8"))]
    except UnicodeDecodeError as error:
        raise UserError(f"{source}: not UTF-8 (byte 0x{content[error.start]:02x} at offset {error.start})") from None


def unescaped(text: str) -> str:
    r"""Replace the escapes \n, \t, \r and \\; any other backslash stays."""
    return re.sub(r"\\([ntr\\])", lambda found: found[1].translate(ESCAPES), text)


def encode_prompt(language_model: "LanguageModel", prompt: str) -> list[int]:
    """Return a prompt's tokens, with a note on stderr if the model cannot see them all."""
    ids, context = language_model.tokenizer.encode(prompt), language_model.model.config.context_length
    if (excess := len(ids) - context) > 0:
        note = f"the prompt has {len(ids)} tokens and the model sees {context}: the first {excess} are cut"
        write_line(f"generate.py: {note}", sys.stderr)
    return ids


def print_growing(steps: Iterator[list["Continuation"]]) -> Iterator["Continuation"]:
    """Print a single text as it grows, and then a newline; yield it after each step."""
    printed = 0
    for (text,) in steps:
        print(printable(text, printed), end="", flush=True)
        printed = len(text.logprobs or text.text)
        yield text
    print(flush=True)


def printable(text: "Continuation", start: int = 0) -> str:
    """A text from a place in it on; if log-probabilities were asked for, instead a line for each token from there."""
    if not text.logprobs:
        return text.text[start:]
    return "".join("\n  " + described(token) for token in text.logprobs[start:])


def described(token: "TokenLogprob") -> str:
    """A token with its probability, then the likeliest in its place with theirs, in columns."""
    shown = [
        f"{visible(one.token)} {100 * math.exp(one.logprob):.3g}%".replace("\n", "") for one in (token, *token.top)
    ]
    return "  ".join(f"{one:<16}" for one in shown).rstrip()


def as_json(token: "TokenLogprob") -> dict:
    """A token as plain types: its bytes in hexadecimal, since they may be part of a character."""
    own = {"token": token.token.decode("utf-8", "replace"), "bytes": token.token.hex(), "logprob": token.logprob}
    return own | ({"top_logprobs": [as_json(other) for other in token.top]} if token.top else {})


def training_text(path: Path, tokenizer: "Tokenizer", record: dict) -> list["Shards"]:
    """The prepared text that a model learnt from; `UserError` if it is not here."""
    from gpt.text import cache
    from gpt.text.shards import find_shards

    if not (sources := find_shards(record, tokenizer, cache.CACHE)):
        raise UserError(f"--check: the text that {path} has learnt is not in {cache.CACHE}: leave --check out")
    return sources


def copied(ids: list[int], sources: list["Shards"]) -> str:
    """How much of a continuation stands in the training text, and the continuation with those passages in brackets.

    Nothing without `sources`.
    """
    if not sources:
        return ""
    from gpt.text.overlap import LEAST, find_copies

    marks, passage = find_copies(ids, sources)
    if not passage:
        return f"--- copied from the training text: nothing of {LEAST} tokens or more ---\n"
    line = f"{sum(marks)} of {len(ids)} tokens, in [[brackets]]; the longest passage has {len(passage)} characters"
    parts = itertools.groupby(zip(marks, ids, strict=True), key=lambda pair: pair[0])
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode  # a bracket inside a character goes before it
    tokenizer = sources[0].tokenizer
    shown = [(mark, decode(tokenizer.decode_bytes([token for _, token in pairs]))) for mark, pairs in parts]
    marked = "".join(f"[[{text}]]" if mark else text for mark, text in shown)
    return f"--- copied from the training text: {line} ---\n{marked}\n"


def write_insight(page: Path, language_model: "LanguageModel", ids: list[int], *given: Any) -> None:
    """Write the page that shows why the model chose the tokens `ids`; see `insight_page` for what else is given."""
    from gpt.files import replacing
    from gpt.sampling.insight import insight_page

    with replacing(page) as temporary, temporary.open("w", encoding="utf-8") as stream:
        stream.writelines(insight_page(language_model.model, language_model.tokenizer, ids, *given))
    write_line(f"generate.py: wrote {page} ({page.stat().st_size:,} bytes): open it in a browser", sys.stderr)


def print_json(prompts: list[str], steps: Iterator[list["Continuation"]], settings: dict) -> None:
    """Print all samples as one JSON object, with the settings that make them again."""
    start = time.perf_counter()
    (texts,) = collections.deque(steps, maxlen=1)
    seconds = time.perf_counter() - start
    samples = [
        {"prompt": prompt, "text": text.text, "tokens": len(text.tokens), "finish_reason": text.finish_reason}
        | ({"logprobs": [as_json(token) for token in text.logprobs]} if text.logprobs else {})
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    speed = {"tokens_per_second": round(sum(len(text.tokens) for text in texts) / seconds, 1)}
    only_ascii = not (sys.stdout.encoding or "utf-8").lower().startswith("utf")  # as where Windows writes to a file
    print(json.dumps({"samples": samples} | settings | speed, ensure_ascii=only_ascii, indent=2))


def interact(
    continue_texts: "ContinueTexts", encode: Callable[[str], list[int]], num_samples: int, keep_context: bool
) -> None:
    """Ask for prompts and continue each; Ctrl-C ends a text, Ctrl-D the session."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8")  # as prompts from elsewhere are, whatever the locale
    said = ""
    while True:
        try:
            prompt = input("> ")
        except UnicodeDecodeError as error:
            raise UserError(f"standard input: not UTF-8 (byte 0x{error.object[error.start]:02x})") from None
        except EOFError:
            print()
            return
        said = f"{said}\n{prompt}" if keep_context and said and prompt else prompt
        steps = continue_texts([encode(said)] * num_samples)
        try:
            if num_samples == 1:
                before = said
                for text in print_growing(steps):
                    said = before + text.text
            else:
                (texts,) = collections.deque(steps, maxlen=1)
                print("\n---\n".join(map(printable, texts)))
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    with command_line("generate.py"):
        main()
