"""What generate.py prints: a text as it grows, several texts, JSON, or what a text copied."""

import codecs
import json
import math
import sys
import time
from collections.abc import Iterator

from gpt.data.chunking import token_label
from gpt.data.overlap import MIN_COPY_TOKENS, drop_overlaps, find_copies
from gpt.data.token_dataset import TokenSource
from gpt.sampling.language_model import Completion, TokenLogprob


def print_stream(steps: Iterator[list[Completion]]) -> Iterator[list[Completion]]:
    """Print a single text as it grows, and then a newline; yield it after each step."""
    printed = 0
    for [completion] in steps:
        print(format_completion(completion, printed), end="", flush=True)
        printed = len(completion.logprobs or completion.text)
        yield [completion]
    print(flush=True)


def print_samples(prompts: list[str], steps: Iterator[list[Completion]], sources: list[TokenSource]) -> None:
    """Print finished texts after their prompts, each under its number; with `sources`, also what they copied."""
    *_, completions = steps
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True), start=1):
        print(f"--- {number} of {len(prompts)} ---\n{prompt}{format_completion(completion)}")
        print(format_copies(completion.tokens, sources), end="")


def print_json(prompts: list[str], steps: Iterator[list[Completion]], settings: dict) -> None:
    """Print all samples as one JSON object, with the settings that reproduce them."""
    start = time.perf_counter()
    *_, completions = steps
    seconds = time.perf_counter() - start
    samples = []
    for prompt, text in zip(prompts, completions, strict=True):
        sample = {"prompt": prompt, "text": text.text, "tokens": len(text.tokens), "finish_reason": text.finish_reason}
        if text.logprobs:
            sample["logprobs"] = list(map(token_as_json, text.logprobs))
        samples.append(sample)
    speed = {"tokens_per_second": round(sum(len(text.tokens) for text in completions) / seconds, 1)}
    # Windows writes to a file in an encoding that lacks most characters.
    only_ascii = not (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    print(json.dumps({"samples": samples} | settings | speed, ensure_ascii=only_ascii, indent=2))


def format_completion(completion: Completion, start: int = 0) -> str:
    """Return the text from character `start` on. With log-probabilities, return a line for each token from `start`."""
    if not completion.logprobs:
        return completion.text[start:]
    rows = []
    if start == 0:
        rows.append(["token", *(f"likeliest {i + 1}" for i in range(len(completion.logprobs[0].top)))])
    for token in completion.logprobs[start:]:
        choices = (token, *token.top)
        rows.append([f"{token_label(choice.token)} {100 * math.exp(choice.logprob):.3g}%" for choice in choices])
    return "".join("\n  " + "  ".join(f"{cell:<16}" for cell in row).rstrip() for row in rows)


def token_as_json(token: TokenLogprob) -> dict:
    """Describe a token in plain types. Its bytes are in hexadecimal, since they may be part of a character."""
    result = {"token": token.token.decode("utf-8", "replace"), "bytes": token.token.hex(), "logprob": token.logprob}
    if token.top:
        result["top_logprobs"] = list(map(token_as_json, token.top))
    return result


def format_copies(ids: list[int], sources: list[TokenSource]) -> str:
    """Return how much of a completion occurs in the training text, and the completion with such passages in brackets.

    Without `sources` the result is empty.
    """
    if not sources:
        return ""
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode  # a character belongs to its last token
    tokens = [sources[0].tokenizer.decode_bytes([token]) for token in ids]
    texts = [*map(decode, tokens), decode(b"", True)]
    marked = ""
    end_of_last = 0
    counts = []  # characters and tokens of each passage
    for start, end in drop_overlaps(find_copies(ids, sources), texts):
        while start < end and 0x80 <= tokens[start][0] < 0xC0:  # a token that continues a character
            start += 1
        passage = "".join(texts[start:end])
        marked += "".join(texts[end_of_last:start])
        if passage:
            marked += f"[[{passage}]]"
        counts.append((len(passage), end - start))
        end_of_last = end
    if not counts:
        return f"--- copied from the training text: nothing of {MIN_COPY_TOKENS} tokens or more ---\n"
    line = f"{sum(size for _, size in counts)} of {len(ids)} tokens, in [[brackets]]"
    line += f"; the longest passage has {max(counts)[0]} characters"
    return f"--- copied from the training text: {line} ---\n{marked}{''.join(texts[end_of_last:])}\n"
