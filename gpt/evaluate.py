"""The command `python -m gpt.evaluate`: measure how well a model predicts a text."""

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
from gpt.data.token_dataset import find_cached_dataset, list_caches
from gpt.data.token_files import token_dtype
from gpt.data.tokenizer import Tokenizer
from gpt.errors import UserError, require_range
from gpt.files import expand_path
from gpt.loading import find_checkpoint, open_checkpoint

MAX_NATS_PER_TOKEN = 700  # of a larger loss, the perplexity overflows


class EncodedText(NamedTuple):
    """A text's token ids, with an end-of-text before each document, and its counts of documents and bytes."""

    tokens: np.ndarray
    documents: int
    bytes: int


def main(arguments: list[str] | None = None) -> None:
    """Print the model's figures as a table or as JSON."""
    args = parse_arguments(arguments)
    corpus = None
    if args.text:
        corpus = open_corpus(data_config_from_args(args), cache_folder(args), lambda line: print_line(line, sys.stderr))
    path = find_checkpoint(args.checkpoint)

    from gpt.hardware.threads import limit_threads

    with limit_threads():
        report = evaluate(args, path, corpus)
    if args.json:
        print(json.dumps(report, indent=2))
        return
    for key, value in report.items():
        text = value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"
        print(f"{key.replace('_', ' '):<16}{text}")


def evaluate(args: argparse.Namespace, path: Path, corpus: Corpus | None) -> dict[str, Any]:
    """Load a model and score it on a corpus, or else on its run's validation text.

    Args:
        args: The command's arguments.
        path: The checkpoint.
        corpus: The text of --text, if that is given.

    Returns:
        The figures to print. The validation texts of a mixture count together.
    """
    from gpt.hardware.device import DTYPES, choose_device
    from gpt.sampling.scoring import strided_score, sum_scores

    device = choose_device(args.device)
    model, tokenizer, checkpoint = open_checkpoint(path)
    model.to(device).set_compute_dtype(DTYPES[args.precision])
    context_length = model.config.context_length
    warn_of_short_sequences(path, checkpoint, context_length)
    stride = context_length if args.stride is None else args.stride
    require_range("--stride", stride, 1, context_length, note="(the model's context)")
    texts = [encode_corpus(corpus, tokenizer)] if corpus else validation_texts(args, path, tokenizer, checkpoint)
    score = sum_scores(strided_score(model, text.tokens, text.bytes, stride) for text in texts)
    if not score.nats_per_token < MAX_NATS_PER_TOKEN:  # NaN fails as well
        loss = f"the model needs {score.nats_per_token:.4g} nats per token"
        raise UserError(f"{loss}, so its weights are probably damaged: use another checkpoint")
    figures = ("bytes", "tokens", "nats_per_token", "perplexity", "nats_per_byte", "bits_per_byte")
    return {
        "checkpoint": str(path),
        "precision": args.precision,
        "text": ", ".join(args.text) if args.text else "the run's validation text",
        "context": context_length,
        "stride": stride,
        "documents": sum(text.documents for text in texts),
        **{name: getattr(score, name) for name in figures},
    }


def warn_of_short_sequences(path: Path, checkpoint: dict[str, Any], context_length: int) -> None:
    """Print a warning if the checkpoint has only been trained on sequences shorter than its context."""
    full_length_from_step = (checkpoint.get("state") or {}).get("full_length_from_step")
    if full_length_from_step is None:  # before format 4
        full_length_from_step = (checkpoint.get("schedule") or {}).get("whole_from", 0)
    if 1 < checkpoint.get("step", 0) <= full_length_from_step:
        short_length = checkpoint["config"]["trainer"]["short_sequences"]
        trained = f"{path} was trained only on sequences of {short_length} tokens"
        print_warning(f"{trained}; from 0.6 of its horizon on, its run trains on {context_length} tokens")


def encode_corpus(corpus: Corpus, tokenizer: Tokenizer) -> EncodedText:
    """Encode a corpus into a temporary file, because it may be larger than the memory."""
    dtype = token_dtype(tokenizer.vocab_size)
    num_documents = num_bytes = 0
    with tempfile.TemporaryFile() as stream:
        for _, _, chunk in corpus.chunks():
            ids = tokenizer.encode_chunk(chunk.text)
            if chunk.starts_document:
                ids = np.concatenate([[tokenizer.end_of_text], ids])
                num_documents += 1
            stream.write(ids.astype(dtype).data)
            num_bytes += len(chunk.text.encode("utf-8"))
        corpus.require_text(num_bytes)
        stream.flush()
        return EncodedText(np.asarray(np.memmap(stream, dtype, mode="r")), num_documents, num_bytes)


def cache_folder(args: argparse.Namespace) -> Path:
    return Path(args.cache or DEFAULT_CACHE)


def validation_texts(
    args: argparse.Namespace, path: Path, tokenizer: Tokenizer, checkpoint: dict[str, Any]
) -> list[EncodedText]:
    """Return the validation text of a checkpoint's run, as training prepared it; several of a mixture.

    Raises `UserError` if there is no run, or if the text is not in the cache.
    """
    sources = find_cached_dataset(checkpoint, tokenizer, cache_folder(args))
    if not sources:
        caches = " or ".join(map(str, list_caches(checkpoint, cache_folder(args))))
        problem = f"the validation text of its run, if any, is not in {caches}"
        raise UserError(f"{path}: {problem}: give a text with --text")
    texts = []
    for source in sources:
        counts = source.metadata["splits"]["validation"]
        texts.append(EncodedText(source.validation, counts["documents"], counts["bytes"]))
    return texts


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line, and check whatever can be checked before a model is loaded."""
    parser = Parser("python -m gpt.evaluate", "Measure how well a model predicts a text.")
    add = parser.add_argument
    add("--checkpoint", metavar="PATH", help="a run, checkpoint, Hugging Face GPT-2 or hub name (default: newest run)")
    text = "files, folders or quoted globs, as for data.path (default: the validation text of the checkpoint's run)"
    add("--text", metavar="PATH", nargs="+", help=text)
    add_reader_options(parser)
    cache = "the folder of prepared text and downloads (default: that of training)"
    add("--cache", metavar="DIR", type=expand_path, help=cache)
    add("--stride", metavar="N", type=int, help="slide the context by N tokens (default: all of it, without overlap)")
    precisions = ["fp32", "bf16", "fp16"]
    add("--precision", default="fp32", choices=precisions, help="of the products, as in training (default: fp32)")
    add("--device", default="auto", help="auto, cpu, cuda or mps (default: auto)")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    with clean_exit("gpt.evaluate", "choose a smaller model or another --device", as_cli_options):
        main()
