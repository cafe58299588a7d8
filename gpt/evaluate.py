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

from gpt.errors import Parser, UserError, command_line, write_line
from gpt.exchange.opening import find_checkpoint, open_with_record
from gpt.text.cache import CACHE
from gpt.text.corpus import Corpus, find_text_files
from gpt.text.formats import explain_unreadable, read_documents
from gpt.text.progress_bar import progress_bar
from gpt.text.shards import Tokens, find_shards, width
from gpt.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # torch takes seconds to import; `main` imports it once the arguments have proved right
    from gpt.model.transformer import GPT

LINE_BYTES = 1 << 20  # of a question, at most
MOST_NATS = 700  # per token; beyond, the perplexity overflows
# What the readers of text call by the keys of a configuration, and the same here.
OPTIONS = {"data.path=": "--text=", "data.text_field=": "--text-field=", ", or set data.errors=replace": ""}


def main(arguments: list[str] | None = None) -> None:
    """Print the model's figures as a table, or as JSON."""
    args = parse_arguments(arguments)
    with our_options():
        corpus = open_text(args.text, args.text_field) if args.text else None
    path = find_checkpoint(args.checkpoint)

    from gpt.hardware import explained
    from gpt.threads import giving_way

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
    from gpt.hardware import DTYPES, choose_device

    device = choose_device(args.device)
    model, tokenizer, record = open_with_record(path)
    model.to(device).compute_in(DTYPES[args.precision])
    report: dict[str, Any] = {"checkpoint": str(path), "precision": args.precision}
    if args.choices:
        return report | {"choices": str(args.choices)} | answer(model, tokenizer, args.choices)
    stride, context = args.stride or model.config.context_length, model.config.context_length
    if stride > context:
        raise UserError(f"--stride={args.stride} is out of range: it must be at most the model's context, {context}")
    with our_options():
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
    choices = 'a .jsonl of multiple choice in HellaSwag\'s form: {"ctx": TEXT, "endings": [TEXT, ...], "label": NUMBER}'
    what.add_argument("--choices", metavar="FILE", type=Path, help=choices)
    add("--text-field", metavar="KEY", default="text", help="holds the text in .jsonl and .parquet (default: text)")
    add("--stride", metavar="N", type=int, help="slide the context by N tokens (default: all of it, without overlap)")
    precisions = ["fp32", "bf16", "fp16"]
    add("--precision", default="fp32", choices=precisions, help="of the products, as in training (default: fp32)")
    add("--device", default="auto", help="auto, cpu, cuda or mps (default: auto)")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args(arguments)
    if args.stride is not None and args.stride < 1:
        raise UserError(f"--stride={args.stride} is out of range: it must be at least 1")
    if args.stride is not None and args.choices:
        raise UserError("--stride and --choices exclude each other: give one of them")
    return args


# --- a text ---


class Text(NamedTuple):
    """A text's token ids, with an end-of-text before each document, and its counts of documents and bytes."""

    tokens: np.ndarray | Tokens
    documents: int
    bytes: int


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


def open_text(paths: list[str], text_field: str) -> Corpus:
    """Find the files of a text; `UserError` if a path leads to none."""
    files = [file for path in paths for file in find_text_files(path, CACHE, lambda line: write_line(line, sys.stderr))]
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
        if not documents:
            files = ", ".join(map(str, corpus.files[:3])) + ", ..." * (len(corpus.files) > 3)
            raise UserError(f"{files}: every document is empty; give a text, or its key with --text-field=")
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


class Question(NamedTuple):
    """A context, its possible endings, the number of the right one, and the file and line that all this is from."""

    context: str
    endings: list[str]
    label: int
    place: str


def answer(model: "GPT", tokenizer: Tokenizer, file: Path) -> dict[str, int | float]:
    """Answer the questions of a file with the likeliest endings, and return the shares of right answers.

    `acc` compares log-likelihoods, `acc_norm` log-likelihoods divided by the number of characters in the ending. Both
    are what lm_eval 0.4.13 calls by these names; its figure by bytes is `acc_bytes`.
    """
    from gpt.sampling.scoring import continuation_nats

    count = right = right_norm = 0
    for question in read_questions(file):
        rows = [encode_ending(tokenizer, question, ending, model.config.context_length) for ending in question.endings]
        nats = np.array(continuation_nats(model, rows))
        require_sane(float(nats.max()) / max(tokens for _, tokens in rows))
        count += 1
        right += int(nats.argmin() == question.label)
        right_norm += int((nats / [len(ending) for ending in question.endings]).argmin() == question.label)
    if not count:
        raise UserError(f"{file}: holds no questions; give a .jsonl file with one on each line")
    return {"questions": count, "acc": right / count, "acc_norm": right_norm / count}


def encode_ending(tokenizer: Tokenizer, question: Question, ending: str, context_length: int) -> tuple[list[int], int]:
    """Return the ids of a context, a space and an ending, and how many of them count as the ending.

    As in lm_eval, white space at the end of the context counts as the ending's, since tokens begin with it; an empty
    context is an end-of-text; and of a context that is too long for the model, the end stays.
    """
    ids = tokenizer.encode(f"{question.context} {ending}")
    before = len(tokenizer.encode(question.context.rstrip()))
    if (count := len(ids) - before) > context_length:
        too_long = f"an ending of {count} tokens does not fit into the model's context of {context_length}"
        raise UserError(f"{question.place}: {too_long}: leave the question out")
    return (ids if before else [tokenizer.end_of_text, *ids])[-context_length - 1 :], count


def read_questions(file: Path) -> Iterator[Question]:
    """Yield the questions of a .jsonl file; `UserError` names the first line that is none."""
    with explain_unreadable(file), file.open("rb") as stream, progress_bar(file.stat().st_size, delay=1) as bar:
        for number, line in enumerate(iter(lambda: stream.readline(LINE_BYTES), b""), start=1):
            if line.strip():
                yield parse_question(line, f"{file}: line {number}")
            bar.update(len(line))


def parse_question(line: bytes, place: str) -> Question:
    """Parse HellaSwag's form: `ctx`, or `ctx_a` and `ctx_b`; `endings`; and `label`, the number of the right one."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise UserError(f"{place} is not JSON: every line must be one JSON object of at most {LINE_BYTES:,} bytes")
    context, endings, label = (record.get(key) for key in ("ctx", "endings", "label"))
    if context is None:
        halves = [record.get("ctx_a"), record.get("ctx_b") or ""]
        context = " ".join(filter(None, halves)) if all(isinstance(half, str) for half in halves) else None
    if not isinstance(context, str):
        raise UserError(f"{place} has no context: give a text as 'ctx', or two as 'ctx_a' and 'ctx_b'")
    if not isinstance(endings, list) or len(endings) < 2 or not all(isinstance(text, str) and text for text in endings):
        raise UserError(
            f"{place} has no 'endings' to choose from: give a list of two or more texts, none of them empty"
        )
    if str(label) not in (labels := [str(i) for i in range(len(endings))]):
        raise UserError(
            f"{place} has the label {str(label)[:60]!r}: give the number of the right ending, 0 to {labels[-1]}"
        )
    return Question(context, endings, labels.index(str(label)), place)


if __name__ == "__main__":
    with command_line("gpt.evaluate"):
        main()
