"""Sample text from a trained model: python generate.py --prompt "..." """

import argparse
import contextlib
import io
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpt.errors import Parser, UserError, command_line
from gpt.text.pieces import well_formed

if TYPE_CHECKING:  # torch takes seconds to import; `main` imports it once the arguments have proved right
    import torch

    from gpt.model.transformer import GPT
    from gpt.sampling.generation import Sampling, TextStream
    from gpt.text.tokenizer import Tokenizer

LONGEST_PROMPT = 32_000_000  # bytes; a model sees some thousand


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn running out of memory, and a model that computes no finite numbers, into a `UserError`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        from gpt.hardware import is_out_of_memory

        if is_out_of_memory(error):
            remedy = "lower --num-samples, --max-new-tokens or --precision, or close other programs"
            raise UserError(f"memory has run out: {remedy}") from None
        if "probability tensor contains" in str(error):
            raise UserError("the model's logits are not finite, so it is damaged: use another checkpoint") from None
        raise


@explained()
def main(arguments: list[str] | None = None) -> None:
    """Load a model, read the prompts, and print how the model continues them."""
    args = parse_arguments(arguments)
    import torch

    from gpt.exchange.opening import find_checkpoint, open_model
    from gpt.hardware import choose_device, choose_precision
    from gpt.sampling.compiled import require_compilable
    from gpt.sampling.generation import Sampling
    from gpt.sampling.packed import choose_sampling_precision, pack_weights

    sampling = Sampling(args.repetition_penalty, args.temperature, args.top_k, args.top_p, args.min_p)
    device = choose_device(args.device)
    prompts = [] if args.interactive else [prompt for prompt in read_prompts(args) for _ in range(args.num_samples)]
    rows = len(prompts) or args.num_samples

    path = find_checkpoint(args.checkpoint)
    if args.checkpoint is None and sys.stderr.isatty():
        print(f"generate.py: sampling from {path}", file=sys.stderr)
    model, tokenizer = open_model(path)
    if args.slide > (context := model.config.context_length):
        raise UserError(f"--slide={args.slide} is out of range: it must be at most the model's context, {context}")
    precision = choose_sampling_precision(args.precision, model.to(device), choose_precision("auto", device))
    if args.compile:
        require_compilable(precision, rows)
    pack_weights(model, precision, rows, args.compile)

    seed = args.seed if args.seed is not None else torch.Generator().seed() >> 1
    generator = torch.Generator(device).manual_seed(seed)
    sampler = Sampler(model, tokenizer, sampling, generator, args.max_new_tokens, args.slide, tuple(args.stop))
    if args.interactive:
        interact(sampler, args.num_samples)
    elif args.json:
        print_json(sampler, prompts, {"checkpoint": str(path), "seed": seed, "sampling": vars(sampling)})
    elif len(prompts) == 1:
        print(prompts[0], end="", flush=True)
        sampler.continue_texts(prompts, stream=True)
    else:
        for number, (prompt, text) in enumerate(zip(prompts, sampler.continue_texts(prompts), strict=True), start=1):
            print(f"--- {number} of {len(prompts)} ---\n{prompt}{text.text}")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line, and check whatever can be checked before a model is loaded."""
    parser = Parser("python generate.py", "Continue a prompt with a trained model.")
    add = parser.add_argument_group("prompt (default: standard input, or on a terminal a new document)").add_argument
    add("--prompt", metavar="TEXT", action="append", help="repeat it to continue several prompts at once")
    add("--prompt-file", metavar="FILE", type=Path, help="a UTF-8 file; one newline at its end is dropped")
    add("--interactive", action="store_true", help="ask for prompts until Ctrl-D")
    add = parser.add_argument_group("model").add_argument
    add("--checkpoint", metavar="PATH", help="a run, checkpoint or Hugging Face GPT-2 (default: newest run in runs/)")
    add("--device", default="auto", help="auto, cpu, cuda or mps (default: auto)")
    add("--precision", default="auto", choices=["auto", "fp32", "bf16", "int8"], help="auto: bf16 where it is faster")
    add("--compile", action="store_true", help="for one long text in bf16 or int8: takes seconds to start, then faster")
    add = parser.add_argument_group("text").add_argument
    add("--max-new-tokens", metavar="N", type=int, default=300, help="default: 300")
    add("--num-samples", metavar="N", type=int, default=1, help="continuations of each prompt (default: 1)")
    add("--stop", metavar="TEXT", action="append", default=[], help="end before this text; repeatable")
    add("--seed", metavar="N", type=int, help="the same seed gives the same text (default: a new one each time)")
    add("--slide", metavar="N", type=int, default=1, help="tokens to drop whenever the context is full (default: 1)")
    add("--json", action="store_true", help="print one JSON object instead of the text")
    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", metavar="X", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)")
    add("--top-k", metavar="N", type=int, default=0, help="keep the N likeliest tokens (default: off)")
    add("--top-p", metavar="X", type=float, default=0.95, help="keep the likeliest that sum to X (default: 0.95)")
    add("--min-p", metavar="X", type=float, default=0.0, help="drop tokens below X times the likeliest (default: off)")
    add("--repetition-penalty", metavar="X", type=float, default=1.0, help="above 1 repeats less (default: 1)")
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
        return [content.decode("utf-8").removesuffix("\n")]
    except UnicodeDecodeError as error:
        raise UserError(f"{source}: not UTF-8 (byte 0x{content[error.start]:02x} at offset {error.start})") from None


@dataclass
class Sampler:
    """A model on its device, and how to sample from it."""

    model: "GPT"
    tokenizer: "Tokenizer"
    sampling: "Sampling"
    generator: "torch.Generator"
    max_new_tokens: int
    slide: int
    stops: tuple[str, ...]

    def continue_texts(self, prompts: list[str], stream: bool = False) -> list["TextStream"]:
        """Continue all prompts at once; `stream` prints the text of a single one as it grows."""
        from gpt.sampling.generation import TextStream, align, generate

        encoded = {prompt: self.encode(prompt) for prompt in prompts}
        idx, padding = align([encoded[prompt] for prompt in prompts])
        self.require_memory(*idx.shape)
        idx = idx.to(self.generator.device)
        texts = [TextStream(self.tokenizer, self.stops) for _ in prompts]
        for tokens in generate(
            self.model, idx, self.max_new_tokens, self.sampling, self.generator, slide=self.slide, padding=padding
        ):
            for text, token in zip(texts, tokens.tolist(), strict=True):
                if text.finish_reason is None:
                    piece = text.feed(token)
                    if stream:
                        print(piece, end="", flush=True)
            if all(text.finish_reason for text in texts):
                break
        for text in texts:
            rest = text.finish() if text.finish_reason is None else ""
            if stream:
                print(rest, flush=True)
        return texts

    def require_memory(self, rows: int, prompt: int) -> None:
        """Raise `UserError` if texts of that many tokens and the new ones do not fit into the free memory."""
        from gpt.hardware import free_memory

        config, length = self.model.config, prompt + self.max_new_tokens
        seen = min(length, config.context_length)
        # A row takes 100 bytes for a token as a number and as text, its keys and values, the activations of a layer,
        # and its logits ten times over while they are sorted and filtered.
        row = 100 * length + 4 * seen * config.d_model * (2 * config.num_layers + 8) + 40 * config.vocab_size
        if (needs := rows * row) > (free := free_memory(self.generator.device)):
            raise UserError(
                f"{rows:,} texts of up to {length:,} tokens need about {needs / 1e9:,.1f} GB of memory, and "
                f"{free / 1e9:,.1f} GB are free: lower --num-samples or --max-new-tokens"
            )

    def encode(self, prompt: str) -> list[int]:
        """Return a prompt's tokens; only the last ones, with a note on stderr, if the model cannot see them all."""
        ids, context = self.tokenizer.encode(prompt), self.model.config.context_length
        if (excess := len(ids) - context) > 0:
            note = f"the prompt has {len(ids)} tokens and the model sees {context}: the first {excess} are cut"
            print(f"generate.py: {note}", file=sys.stderr)
        return ids[-context:] or [self.tokenizer.end_of_text]


def print_json(sampler: Sampler, prompts: list[str], settings: dict) -> None:
    """Print all samples as one JSON object, with the settings that make them again."""
    start = time.perf_counter()
    texts = sampler.continue_texts(prompts)
    seconds = time.perf_counter() - start
    samples = [
        {"prompt": prompt, "text": text.text, "tokens": len(text.tokens), "finish_reason": text.finish_reason}
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    speed = {"tokens_per_second": round(sum(len(text.tokens) for text in texts) / seconds, 1)}
    print(json.dumps({"samples": samples} | settings | speed, ensure_ascii=False, indent=2))


def interact(sampler: Sampler, num_samples: int) -> None:
    """Ask for prompts and continue each; Ctrl-C ends a text, Ctrl-D the session."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8")  # as prompts from elsewhere are, whatever the locale
    while True:
        try:
            prompt = input("> ")
        except UnicodeDecodeError as error:
            raise UserError(f"standard input: not UTF-8 (byte 0x{error.object[error.start]:02x})") from None
        except EOFError:
            print()
            return
        try:
            texts = sampler.continue_texts([prompt] * num_samples, stream=num_samples == 1)
            if num_samples > 1:
                print("\n---\n".join(text.text for text in texts))
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    with command_line("generate.py"):
        main()
