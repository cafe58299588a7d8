"""Sample text from a trained model: python generate.py --prompt "..." """

import argparse
import json
import sys
import time
from pathlib import Path
from typing import NoReturn

from gpt.errors import UserError, command_line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see python generate.py --help")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = _Parser(prog="generate.py", description="Continue a prompt with a trained model.", allow_abbrev=False)
    prompt = parser.add_argument_group("prompt (without one: standard input, or a document from its beginning)")
    prompt.add_argument("--prompt", metavar="TEXT", action="append", help="repeatable: all are continued at once")
    prompt.add_argument(
        "--prompt-file", metavar="FILE", type=Path, help="a UTF-8 file; one newline at its end is dropped"
    )
    prompt.add_argument("--interactive", action="store_true", help="ask for prompts until Ctrl-D")
    model = parser.add_argument_group("model")
    model.add_argument(
        "--checkpoint",
        metavar="PATH",
        help="a run directory, a checkpoint file or a Hugging Face GPT-2 directory; default: the newest run in runs/",
    )
    model.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    model.add_argument("--precision", default="auto", choices=["auto", "fp32", "bf16", "int8"],
                       help="of the weights; auto: bf16 where it is faster")  # fmt: skip
    model.add_argument("--compile", action="store_true", help="for one long text in bf16 or int8: seconds to begin "
                       "with, then faster")  # fmt: skip
    text = parser.add_argument_group("text")
    text.add_argument("--max-new-tokens", metavar="N", type=int, default=300)
    text.add_argument("--num-samples", metavar="N", type=int, default=1)
    text.add_argument("--stop", metavar="TEXT", action="append", default=[], help="end before this text; repeatable")
    text.add_argument(
        "--seed",
        metavar="N",
        type=int,
        help="the same gives the same text; default: a new one",
    )
    text.add_argument("--slide", metavar="N", type=int, default=1, help="past the context, move on by N tokens: "
                      "1 sees the most, more is faster (default: 1)")  # fmt: skip
    text.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    draw = parser.add_argument_group("sampling")
    draw.add_argument("--temperature", metavar="X", type=float, default=0.8, help="0 is greedy (default: 0.8)")
    draw.add_argument("--top-k", metavar="N", type=int, default=0, help="keep the N likeliest tokens (default: off)")
    draw.add_argument("--top-p", metavar="X", type=float, default=0.95, help="keep the likeliest that together reach X")
    draw.add_argument(
        "--min-p", metavar="X", type=float, default=0.0, help="drop tokens X times less likely than the first"
    )
    draw.add_argument(
        "--repetition-penalty", metavar="X", type=float, default=1.0, help="above 1 discourages repetition"
    )
    args = parser.parse_args(arguments)
    for name, most in (("max_new_tokens", 10_000_000), ("num_samples", 10_000), ("slide", 1_000_000)):
        if not 1 <= (value := getattr(args, name)) <= most:
            limits = f"at least 1 and at most {most}"
            raise UserError(f"--{name.replace('_', '-')}={value} is out of range: it must be {limits}")
    if args.seed is not None and not 0 <= args.seed < 1 << 63:
        raise UserError(f"--seed={args.seed} is out of range: it must be at least 0 and below 2^63")
    if "" in args.stop:
        raise UserError("--stop='' would end every text before it begins: give at least one character")
    if sum([args.prompt is not None, args.prompt_file is not None, args.interactive]) > 1:
        raise UserError("--prompt, --prompt-file and --interactive exclude each other: give one of them")
    if args.interactive and args.json:
        raise UserError("--interactive and --json exclude each other: give one of them")
    return args


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts from the command line, or one from a file or standard input."""
    if args.prompt is not None:
        return args.prompt
    if args.prompt_file is not None:
        source = str(args.prompt_file)
        try:
            content = args.prompt_file.read_bytes()
        except OSError as error:
            raise UserError(f"{source}: cannot be read ({error.strerror})") from None
    else:
        source = "standard input"
        content = b"" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer.read()
    try:
        return [content.decode("utf-8").removesuffix("\n")]
    except UnicodeDecodeError as error:
        raise UserError(f"{source}: not UTF-8 (byte 0x{content[error.start]:02x} at offset {error.start})") from None


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    # Only now the slow imports: a mistyped option is answered at once.
    import torch

    from gpt.exchange import checkpoint, huggingface
    from gpt.hardware import choose_device, choose_precision
    from gpt.sampling.generation import Sampling, TextStream, align, generate
    from gpt.sampling.packed import choose_sampling_precision, prepare, require_compilable
    from gpt.text.pieces import well_formed

    sampling = Sampling(args.repetition_penalty, args.temperature, args.top_k, args.top_p, args.min_p)
    device = choose_device(args.device)
    prompts = None if args.interactive else read_prompts(args)
    path = Path(args.checkpoint or "")
    if args.checkpoint is not None and huggingface.is_directory(path):
        model, tokenizer = huggingface.build_model(path)
    else:
        path = checkpoint.find(args.checkpoint)
        if args.checkpoint is None and sys.stderr.isatty():
            print(f"generate.py: sampling from {path}", file=sys.stderr)
        model, tokenizer = checkpoint.build_model(checkpoint.load(path))
    precision = choose_sampling_precision(args.precision, model.to(device), choose_precision("auto", device))
    rows = args.num_samples * len(prompts or [""])
    if args.compile:
        require_compilable(precision, rows)
    prepare(model, precision, rows, args.compile)
    seed = args.seed if args.seed is not None else torch.Generator().seed() >> 1
    generator = torch.Generator(device).manual_seed(seed)
    context = model.config.context_length
    if args.slide > context:
        raise UserError(f"--slide={args.slide} is out of range: it must be at most the model's context, {context}")

    def continue_texts(prompts: list[str], stream: bool) -> list[TextStream]:
        """The samples of each prompt's continuation, all made at once; a single one is printed as it is made."""
        rows = [ids for prompt in prompts for ids in [within_context(prompt)] * args.num_samples]
        idx, padding = align(rows)
        streams = [TextStream(tokenizer, tuple(args.stop)) for _ in rows]
        made = generate(
            model, idx.to(device), args.max_new_tokens, sampling, generator, slide=args.slide, padding=padding
        )
        for tokens in made:
            for out, token in zip(streams, tokens.tolist(), strict=True):
                if out.finish_reason is None:
                    piece = out.feed(token)
                    if stream:
                        print(piece, end="", flush=True)
            if all(out.finish_reason for out in streams):
                break
        for out in streams:
            rest = out.finish() if out.finish_reason is None else ""
            if stream:
                print(rest, flush=True)
        return streams

    def within_context(prompt: str) -> list[int]:
        """The tokens of a prompt, the last of them where they are too many."""
        ids = tokenizer.encode(prompt) or [tokenizer.end_of_text]
        if len(ids) > context:
            cut = len(ids) - context
            note = f"the prompt has {len(ids)} tokens and the model sees {context}: the first {cut} are cut"
            print(f"generate.py: {note}", file=sys.stderr)
        return ids[-context:]

    if prompts is None:
        interact(continue_texts, args.num_samples)
        return
    texts = [well_formed(prompt) for prompt in prompts for _ in range(args.num_samples)]
    if args.json:
        start = time.perf_counter()
        streams = continue_texts(prompts, stream=False)
        seconds = time.perf_counter() - start
        samples = [
            {"prompt": text, "text": out.text, "tokens": len(out.tokens), "finish_reason": out.finish_reason}
            for text, out in zip(texts, streams, strict=True)
        ]
        report = {
            "samples": samples,
            "checkpoint": str(path),
            "seed": seed,
            "sampling": vars(sampling),
            "tokens_per_second": round(sum(len(out.tokens) for out in streams) / seconds, 1),
        }
        print(json.dumps(report, ensure_ascii=False, indent=2))
    elif len(texts) == 1:
        print(texts[0], end="", flush=True)
        continue_texts(prompts, stream=True)
    else:
        for number, (text, out) in enumerate(zip(texts, continue_texts(prompts, stream=False), strict=True), start=1):
            print(f"--- {number} of {len(texts)} ---\n{text}{out.text}")


def interact(continue_texts, num_samples: int) -> None:
    """Ask for prompts and continue each; Ctrl-C ends a text, Ctrl-D the session."""
    while True:
        try:
            prompt = input("> ")
        except UnicodeDecodeError as error:
            raise UserError(f"standard input: not UTF-8 (byte 0x{error.object[error.start]:02x})") from None
        except (EOFError, RuntimeError):  # RuntimeError: there is no standard input
            print()
            return
        try:
            streams = continue_texts([prompt], stream=num_samples == 1)
            if num_samples > 1:
                print("\n---\n".join(out.text for out in streams))
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    with command_line("generate.py"):
        main()
