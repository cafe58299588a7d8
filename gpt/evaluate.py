"""The command `python -m gpt.evaluate`: how well a model predicts a text."""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpt.console import Parser, clean_exit, print_line, print_warning
from gpt.data.corpus import Corpus, open_corpus
from gpt.data.data_config import add_reader_options, as_cli_options, data_config_from_args
from gpt.data.dataset_cache import DEFAULT_CACHE
from gpt.data.token_dataset import find_cached_dataset
from gpt.data.token_files import token_dtype
from gpt.data.tokenizer import Tokenizer
from gpt.errors import UserError, require_range
from gpt.loading import find_checkpoint, open_checkpoint

MAX_NATS_PER_TOKEN = 700  # per token; beyond, the perplexity overflows


def main(arguments: list[str] | None = None) -> None:
    """Print the model's figures as a table, or as JSON."""
    args = parse_arguments(arguments)
    corpus = (
        open_corpus(data_config_from_args(args), DEFAULT_CACHE, lambda line: print_line(line, sys.stderr))
        if args.text
        else None
    )
    path = find_checkpoint(args.checkpoint)

    from gpt.hardware.threads import yield_to_other_processes

    with yield_to_other_processes():
        report = evaluate(args, path, corpus)
    if args.json:
        print(json.dumps(report, indent=2))
        return
    for key, value in report.items():
        shown = value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"
        print(f"{key.replace('_', ' '):<16}{shown}")


def evaluate(args: argparse.Namespace, path: Path, corpus: Corpus | None) -> dict[str, Any]:
    """Load a model, and score what the command line asks for; several validation texts count together."""
    from gpt.hardware.device import DTYPES, choose_device
    from gpt.sampling.scoring import strided_score, sum_scores

    device = choose_device(args.device)
    model, tokenizer, record = open_checkpoint(path)
    model.to(device).set_compute_dtype(DTYPES[args.precision])
    context = model.config.context_length
    full_length_from_step = (record.get("state") or {}).get("full_length_from_step")
    if full_length_from_step is None:  # before format 4
        full_length_from_step = (record.get("schedule") or {}).get("whole_from", 0)
    if 1 < record.get("step", 0) <= full_length_from_step:
        short = record["config"]["trainer"]["short_sequences"]
        print_warning(
            f"{path} knows contexts of {short} tokens: its run learns those of {context} from 0.6 of its horizon on"
        )
    stride = context if args.stride is None else args.stride
    require_range("--stride", stride, 1, context, note="(the model's context)")
    texts = [encode(corpus, tokenizer)] if corpus else validation_texts(path, tokenizer, record)
    score = sum_scores(strided_score(model, text.tokens, text.bytes, stride) for text in texts)
    if not score.nats_per_token < MAX_NATS_PER_TOKEN:
        needs = f"the model needs {score.nats_per_token:.4g} nats per token"
        raise UserError(f"{needs}, so its weights are probably damaged: use another checkpoint")
    figures = ("bytes", "tokens", "nats_per_token", "perplexity", "nats_per_byte", "bits_per_byte")
    return {
        "checkpoint": str(path),
        "precision": args.precision,
        "text": ", ".join(args.text) if args.text else "the run's validation text",
        "context": context,
        "stride": stride,
        "documents": sum(text.documents for text in texts),
        **{name: getattr(score, name) for name in figures},
    }


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line, and check whatever can be checked before a model is loaded."""
    parser = Parser("python -m gpt.evaluate", "Measure how well a model predicts a text.")
    add = parser.add_argument
    add("--checkpoint", metavar="PATH", help="a run, checkpoint, Hugging Face GPT-2 or hub name (default: newest run)")
    text = "files, folders or quoted globs, as for data.path (default: the validation text of the checkpoint's run)"
    add("--text", metavar="PATH", nargs="+", help=text)
    add_reader_options(parser)
    add("--stride", metavar="N", type=int, help="slide the context by N tokens (default: all of it, without overlap)")
    precisions = ["fp32", "bf16", "fp16"]
    add("--precision", default="fp32", choices=precisions, help="of the products, as in training (default: fp32)")
    add("--device", default="auto", help="auto, cpu, cuda or mps (default: auto)")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    return parser.parse_args(arguments)


class Text(NamedTuple):
    """A text's token ids, with an end-of-text before each document, and its counts of documents and bytes."""

    tokens: np.ndarray
    documents: int
    bytes: int


def encode(corpus: Corpus, tokenizer: Tokenizer) -> Text:
    """Encode a text into a temporary file, because it may be larger than the memory."""
    documents = size = 0
    with tempfile.TemporaryFile() as stream:
        for _, _, chunk in corpus.chunks():
            ids = tokenizer.encode_chunk(chunk.text)
            if chunk.begins:
                ids = np.concatenate([[tokenizer.end_of_text], ids])
            stream.write(ids.astype(token_dtype(tokenizer.vocab_size)).data)
            documents, size = documents + chunk.begins, size + len(chunk.text.encode("utf-8"))
        corpus.require_text(size)
        stream.flush()
        return Text(np.asarray(np.memmap(stream, token_dtype(tokenizer.vocab_size), mode="r")), documents, size)


def validation_texts(path: Path, tokenizer: Tokenizer, record: dict[str, Any]) -> list[Text]:
    """Return the validation text of a checkpoint's run, or the several of a mixture, as training prepared it.

    `record` is what the checkpoint says. `UserError` if the text is not in the cache, or if there is no run.
    """
    if not (sources := find_cached_dataset(record, tokenizer, DEFAULT_CACHE)):
        raise UserError(
            f"{path}: the validation text of its run, if any, is not in {DEFAULT_CACHE}: give a text with --text"
        )
    counts = [source.metadata["splits"]["validation"] for source in sources]
    return [Text(source.validation, n["documents"], n["bytes"]) for source, n in zip(sources, counts, strict=True)]


if __name__ == "__main__":
    with clean_exit("gpt.evaluate", "choose a smaller model or another --device", as_cli_options):
        main()
