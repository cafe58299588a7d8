"""What generate.py prints: growing text, several texts, JSON, or answers to prompts as they are typed."""

import codecs
import functools
import io
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from gpt.console import print_line
from gpt.data.chunking import token_label
from gpt.data.overlap import MIN_COPY_TOKENS, drop_overlaps, find_copies
from gpt.data.token_dataset import TokenSource
from gpt.errors import UserError
from gpt.sampling.arguments import parse_arguments
from gpt.sampling.language_model import Completion, TokenLogprob

OPTION = re.compile(r"/([A-Za-z][\w-]*)(?:\s+|$)(\S*)\s*")  # a line that is no prompt; /usr/bin is one


def print_growing(steps: Iterator[list[Completion]]) -> Iterator[list[Completion]]:
    """Print a single text as it grows, and then a newline; yield it after each step."""
    printed = 0
    for [text] in steps:
        print(printable(text, printed), end="", flush=True)
        printed = len(text.logprobs or text.text)
        yield [text]
    print(flush=True)


def print_several(prompts: list[str], steps: Iterator[list[Completion]], sources: list[TokenSource]) -> None:
    """Print finished texts after their prompts, each under its number; with `sources`, also what they copied."""
    *_, texts = steps
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True), start=1):
        print(f"--- {number} of {len(prompts)} ---\n{prompt}{printable(text)}")
        print(copied(text.tokens, sources), end="")


def print_json(prompts: list[str], steps: Iterator[list[Completion]], settings: dict) -> None:
    """Print all samples as one JSON object, with the settings that make them again."""
    start = time.perf_counter()
    *_, texts = steps
    seconds = time.perf_counter() - start
    samples = [
        {"prompt": prompt, "text": text.text, "tokens": len(text.tokens), "finish_reason": text.finish_reason}
        | ({"logprobs": list(map(token_as_json, text.logprobs))} if text.logprobs else {})
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    speed = {"tokens_per_second": round(sum(len(text.tokens) for text in texts) / seconds, 1)}
    only_ascii = not (sys.stdout.encoding or "utf-8").lower().startswith("utf")  # as where Windows writes to a file
    print(json.dumps({"samples": samples} | settings | speed, ensure_ascii=only_ascii, indent=2))


def interact(
    generate_batch: functools.partial,
    encode: Callable[[str], list[int]],
    num_samples: int,
    keep_context: bool,
) -> None:
    """Ask for prompts and continue each; Ctrl-C ends a text, Ctrl-D the session, and `/top-k 5` sets an option."""
    if sys.stdin.isatty():
        leave = "Ctrl-D (on Windows Ctrl-Z and Enter) leaves, Ctrl-C ends a text"
        print_line(f"{leave}, and a line such as /temperature 0.5 changes an option", sys.stderr)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="replace")  # as prompts from elsewhere, whatever the locale
    said = ""
    while True:
        try:
            prompt = input("> ")
        except EOFError:
            print()
            return
        if option := OPTION.fullmatch(prompt):
            try:
                generate_batch = _with_option(generate_batch, *option.groups())
            except UserError as error:
                print_line(str(error), sys.stderr)
            continue
        said = f"{said}\n{prompt}" if keep_context and said and prompt else prompt
        steps = generate_batch([encode(said)] * num_samples)
        try:
            if num_samples == 1:
                before = said
                for [text] in print_growing(steps):
                    said = before + text.text
            else:
                *_, texts = steps
                print("\n---\n".join(map(printable, texts)))
        except KeyboardInterrupt:
            print()


def _with_option(generate_batch: functools.partial, name: str, value: str) -> functools.partial:
    """Return what continues texts with another option; `UserError` if there is none such, or it is out of range."""
    sampling, key = generate_batch.keywords["sampling"], name.replace("-", "_")
    if key not in (known := ("max_new_tokens", *vars(sampling))):
        raise UserError(f"/{name} is no option: choose from /{' /'.join(known).replace('_', '-')}")
    given = {key: getattr(parse_arguments([f"--{key.replace('_', '-')}={value}"]), key)}
    if key in vars(sampling):
        given = {"sampling": replace(sampling, **given)}
    return functools.partial(generate_batch, **given)


def printable(text: Completion, start: int = 0) -> str:
    """Return a text from a place in it on; or a line for each token from there, if log-probabilities were asked for."""
    if not text.logprobs:
        return text.text[start:]
    rows = [] if start else [["token", *(f"likeliest {i + 1}" for i in range(len(text.logprobs[0].top)))]]
    for token in text.logprobs[start:]:
        rows.append([f"{token_label(one.token)} {100 * math.exp(one.logprob):.3g}%" for one in (token, *token.top)])
    return "".join("\n  " + "  ".join(f"{cell:<16}" for cell in row).rstrip() for row in rows)


def token_as_json(token: TokenLogprob) -> dict:
    """Describe a token in plain types: its bytes in hexadecimal, since they may be part of a character."""
    own = {"token": token.token.decode("utf-8", "replace"), "bytes": token.token.hex(), "logprob": token.logprob}
    return own | ({"top_logprobs": list(map(token_as_json, token.top))} if token.top else {})


def copied(ids: list[int], sources: list[TokenSource]) -> str:
    """Say how much of a continuation stands in the training text, and show it with each passage in brackets.

    Nothing without `sources`.
    """
    if not sources:
        return ""
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode  # a character belongs to its last token
    tokens = [sources[0].tokenizer.decode_bytes([token]) for token in ids]
    texts = [*map(decode, tokens), decode(b"", True)]
    marked, counts, at = "", [], 0
    for start, end in drop_overlaps(find_copies(ids, sources), texts):
        while start < end and 0x80 <= tokens[start][0] < 0xC0:  # which goes on with a character
            start += 1
        passage = "".join(texts[start:end])
        marked += "".join(texts[at:start]) + f"[[{passage}]]" * bool(passage)
        counts.append((len(passage), end - start))
        at = end
    if not counts:
        return f"--- copied from the training text: nothing of {MIN_COPY_TOKENS} tokens or more ---\n"
    line = f"{sum(size for _, size in counts)} of {len(ids)} tokens, in [[brackets]]"
    line += f"; the longest passage has {max(counts)[0]} characters"
    return f"--- copied from the training text: {line} ---\n{marked}{''.join(texts[at:])}\n"
