"""The command `python -m gpt.evaluate`: how well a model predicts a text, or answers multiple-choice questions."""

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gpt.console import Parser, command_line, progress_bar, say
from gpt.errors import UserError, require_range
from gpt.exchange.loading import find_checkpoint, open_with_record
from gpt.text.cache import CACHE
from gpt.text.corpus.corpus import Corpus
from gpt.text.corpus.files import find_text_files
from gpt.text.corpus.formats import explain_unreadable, read_documents
from gpt.text.shards import Tokens, find_shards, width
from gpt.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # torch takes seconds to import; `main` imports it once the arguments have proved right
    from gpt.model.transformer import GPT

LINE_BYTES = 1 << 20  # of a question, at most
FORM = '{"ctx": TEXT, "endings": [TEXT, TEXT, ...], "label": NUMBER OF THE RIGHT ONE, FROM 0}'  # HellaSwag's
MOST_NATS = 700  # per token; beyond, the perplexity overflows
# What the readers of text call by the keys of a configuration, and the same here.
OPTIONS = {"data.path=": "--text=", "data.text_field=": "--text-field=", ", or set data.errors=replace": ""}


@contextlib.contextmanager
def our_options() -> Iterator[None]:
    """Let the readers of text name the options of this command in their messages."""
    try:
        yield
    except UserError as error:
        message = str(error)
        for key, option in OPTIONS.items():
            message = message.replace(key, option)
        raise UserError(message) from None


@our_options()
def main(arguments: list[str] | None = None) -> None:
    """Print the model's figures as a table, or as JSON."""
    args = parse_arguments(arguments)
    corpus = open_text(args.text, args.text_field) if args.text else None
    path = find_checkpoint(args.checkpoint)

    from gpt.hardware.memory import explained
    from gpt.hardware.threads import giving_way

    with explained("choose a smaller model or another --device"), giving_way():
        report = evaluate(args, path, corpus)
    if args.json:
        print(json.dumps(report, indent=2))
        return
    for key, value in report.items():
        shown = value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"
        print(f"{key.replace('_', ' '):<16}{shown}")


def evaluate(args: argparse.Namespace, path: Path, corpus: Corpus | None) -> dict[str, Any]:
    """Load a model, and measure what the command line asks for."""
    from gpt.hardware.device import DTYPES, choose_device

    device = choose_device(args.device)
    model, tokenizer, record = open_with_record(path)
    model.to(device).compute_in(DTYPES[args.precision])
    report: dict[str, Any] = {"checkpoint": str(path), "precision": args.precision}
    if args.choices:
        return report | {"choices": str(args.choices)} | answer(model, tokenizer, args.choices)
    context = model.config.context_length
    stride = context if args.stride is None else args.stride
    require_range("--stride", stride, 1, context, note="(the model's context)")
    texts = [encode(corpus, tokenizer)] if corpus else validation_texts(path, tokenizer, record)
    name = ", ".join(args.text) if args.text else "the run's validation text"
    return report | {"text": name, "context": context, "stride": stride} | measure(model, texts, stride)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line, and check whatever can be checked before a model is loaded."""
    parser = Parser("python -m gpt.evaluate", "Measure how well a model predicts a text, or answers multiple choice.")
    add = parser.add_argument
    add("--checkpoint", metavar="PATH", help="a run, checkpoint, Hugging Face GPT-2 or hub name (default: newest run)")
    what = parser.add_mutually_exclusive_group()
    text = "files, folders or quoted globs, as for data.path (default: the validation text of the checkpoint's run)"
    what.add_argument("--text", metavar="PATH", nargs="+", help=text)
    what.add_argument("--choices", metavar="FILE", type=Path, help=f"a .jsonl of multiple choice: {FORM}")
    add("--text-field", metavar="KEY", default="text", help="holds the text in .jsonl and .parquet (default: text)")
    add("--stride", metavar="N", type=int, help="slide the context by N tokens (default: all of it, without overlap)")
    precisions = ["fp32", "bf16", "fp16"]
    add("--precision", default="fp32", choices=precisions, help="of the products, as in training (default: fp32)")
    add("--device", default="auto", help="auto, cpu, cuda or mps (default: auto)")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args(arguments)
    if args.stride is not None and args.choices:
        raise UserError("--stride and --choices exclude each other: give one of them")
    return args


# --- a text ---


class Text(NamedTuple):
    """A text's token ids, with an end-of-text before each document, and its counts of documents and bytes."""

    tokens: np.ndarray | Tokens
    documents: int
    bytes: int


def open_text(paths: list[str], text_field: str) -> Corpus:
    """Find the files of a text; `UserError` if a path leads to none."""
    files = [file for path in paths for file in find_text_files(path, CACHE, lambda line: say(line, sys.stderr))]
    return Corpus("text", tuple(dict.fromkeys(files)), lambda file: read_documents(file, text_field))


def encode(corpus: Corpus, tokenizer: Tokenizer) -> Text:
    """Encode a text into a temporary file, because it may be larger than the memory."""
    documents = size = 0
    with tempfile.TemporaryFile() as stream:
        for _, _, piece in corpus.pieces():
            ids = tokenizer.encode_piece(piece.text)
            if piece.begins:
                ids = np.concatenate([[tokenizer.end_of_text], ids])
            stream.write(ids.astype(width(tokenizer)).data)
            documents, size = documents + piece.begins, size + len(piece.text.encode("utf-8"))
        corpus.require_text(size)
        stream.flush()
        return Text(np.asarray(np.memmap(stream, width(tokenizer), mode="r")), documents, size)


def validation_texts(path: Path, tokenizer: Tokenizer, record: dict[str, Any]) -> list[Text]:
    """Return the validation text of a checkpoint's run, or the several of a mixture, as training prepared it.

    `record` is what the checkpoint says. `UserError` if the text is not in the cache.
    """
    if not record:
        raise UserError(f"{path}: belongs to no run whose validation text could be used: give a text with --text")
    if not (sources := find_shards(record, tokenizer, CACHE)):
        raise UserError(f"{path}: the text of its run is not in {CACHE}: give a text with --text")
    counts = [source.manifest["splits"]["validation"] for source in sources]
    return [Text(source.validation, n["documents"], n["bytes"]) for source, n in zip(sources, counts, strict=True)]


def measure(model: "GPT", texts: list[Text], stride: int) -> dict[str, int | float]:
    """Score texts together; `strided_score` says which tokens count and what context they have."""
    from gpt.sampling.scoring import strided_score, sum_of

    score = sum_of(strided_score(model, text.tokens, text.bytes, stride) for text in texts)
    require_sane(score.nats_per_token)
    figures = ("bytes", "tokens", "nats_per_token", "perplexity", "nats_per_byte", "bits_per_byte")
    return {"documents": sum(text.documents for text in texts)} | {name: getattr(score, name) for name in figures}


def require_sane(nats: float) -> None:
    """Raise `UserError` for nats per token that only a broken model needs."""
    if not nats < MOST_NATS:
        raise UserError(
            f"the model needs {nats:.4g} nats per token, so its weights are probably damaged: use another checkpoint"
        )


# --- multiple choice ---


def answer(model: "GPT", tokenizer: Tokenizer, file: Path) -> dict[str, int | float]:
    """Answer the questions of a file with the likeliest endings, and return the shares of right answers.

    As in lm_eval, `acc` compares log-likelihoods, and `acc_norm` divides them by the characters of the ending.
    """
    from gpt.sampling.scoring import continuation_nats

    count = right = right_norm = 0
    for place, context, endings, label in read_questions(file):
        limit = model.config.context_length
        rows = [encode_ending(tokenizer, context, ending, limit) for ending in endings]
        if (longest := max(tokens for _, tokens in rows)) > limit:
            too_long = f"an ending of {longest} tokens does not fit into the model's context of {limit}"
            raise UserError(f"{place}: {too_long}: leave the question out")
        nats = np.array(continuation_nats(model, rows))
        require_sane(float(nats.max()) / longest)
        count += 1
        right += int(nats.argmin() == label)
        right_norm += int((nats / [len(ending) for ending in endings]).argmin() == label)
    if not count:
        raise UserError(f"{file}: holds no questions; give a .jsonl file with one on each line")
    return {"questions": count, "acc": right / count, "acc_norm": right_norm / count}


def encode_ending(tokenizer: Tokenizer, context: str, ending: str, limit: int) -> tuple[list[int], int]:
    """Return the ids of a context, a space and an ending, and how many of them count as the ending.

    As in lm_eval, white space at the end of the context counts as the ending's, since tokens begin with it; an empty
    context is an end-of-text; and of a context that is too long for the model, the end stays.
    """
    ids, before = tokenizer.encode(f"{context} {ending}"), len(tokenizer.encode(context.rstrip()))
    return (ids if before else [tokenizer.end_of_text, *ids])[-limit - 1 :], len(ids) - before


def read_questions(file: Path) -> Iterator[tuple[str, str, list[str], int]]:
    """Yield the place, context, endings and label of each question; `UserError` names the first line that is none."""
    with explain_unreadable(file), file.open("rb") as stream, progress_bar(file.stat().st_size, delay=1) as bar:
        for number, line in enumerate(iter(lambda: stream.readline(LINE_BYTES), b""), start=1):
            if line.strip():
                place = f"{file}: line {number}"
                yield place, *parse_question(line, place)
            bar.update(len(line))


def parse_question(line: bytes, place: str) -> tuple[str, list[str], int]:
    """Parse HellaSwag's form; a label may also be a string."""
    try:
        record = json.loads(line)
        context, endings = record["ctx"], record["endings"]
        label = [str(i) for i in range(len(endings))].index(str(record["label"]))
        texts = [context, *endings] if isinstance(endings, list) and all(endings) else []
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        texts = []
    if len(texts) < 3 or not all(isinstance(text, str) for text in texts):
        raise UserError(f"{place} is not a question: give {FORM}, in at most {LINE_BYTES:,} bytes")
    return context, endings, label


if __name__ == "__main__":
    with command_line("gpt.evaluate"):
        main()
