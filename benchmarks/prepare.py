"""Speed and memory of preparing text: python benchmarks/prepare.py [--large 150] [--json FILE].

Three ways encode the same documents from Python's documentation in turn: tiktoken's own batch encoding in memory, ours
from a file to a dataset on disk, and Hugging Face's `datasets.map` with a fast tokenizer. The benchmark also measures
the peak memory of preparing a large corpus, and the time to open a dataset that is too large to read.
"""

import gzip
import hashlib
import importlib.util
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from measuring import Worker, configure, describe_machine, format_table, make_parser, write_report

from gpt.data import python_docs, token_dataset
from gpt.data.batches import training_batch
from gpt.data.data_config import DataConfig
from gpt.data.dataset_cache import write_checked_json
from gpt.data.prepare import prepare
from gpt.data.token_files import TokenSequence, map_tokens
from gpt.data.tokenizer import TokenizerConfig, byte_tokenizer, gpt2_tokenizer
from gpt.training.start import load_dataset

ROUNDS = 3
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def documents(megabytes: float, seed: int = 1) -> Iterator[str]:
    """Yield excerpts of Python's documentation, of a few hundred to many thousand characters."""
    all_text = "\n".join(text for file in python_docs.find_modules() for text in python_docs.read_docstrings(file))
    rng = random.Random(seed)
    remaining = megabytes * 1e6
    while remaining > 0:
        length = min(int(rng.lognormvariate(7.6, 1)), len(all_text) // 2)
        start = rng.randrange(len(all_text) - length)
        yield all_text[start : start + length]
        remaining -= length


def prepare_file(path: Path, **settings) -> token_dataset.TokenSource:
    """Prepare a text in a new cache beside it."""
    cache = tempfile.mkdtemp(dir=path.parent)
    data = DataConfig("text", str(path), **settings)
    return prepare(data, TokenizerConfig("gpt2"), 128, Path(cache), lambda line: None).sources[0]


def hugging_face(texts: list[str]) -> Callable[[], object]:
    """Return a call of `datasets.map` with GPT-2's tokenizer, as in its documentation, on documents in memory."""
    import datasets
    from transformers import PreTrainedTokenizerFast

    datasets.disable_progress_bars()
    datasets.disable_caching()
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast_gpt2())
    data = datasets.Dataset.from_dict({"text": texts})
    assert tokenizer(texts[0])["input_ids"] == gpt2_tokenizer().encode(texts[0])
    return lambda: data.map(lambda batch: tokenizer(batch["text"]), batched=True, remove_columns=["text"])


def fast_gpt2():
    """Return GPT-2's encoding in the `tokenizers` library, with the merges derived from the ranks."""
    from gpt.interop.vocabulary import to_huggingface_tokenizer

    return to_huggingface_tokenizer(gpt2_tokenizer())


def throughput(megabytes: float, folder: Path) -> dict[str, float]:
    """Return the MB/s of each way, the median of rounds taken in turn."""
    texts = list(documents(megabytes))
    size = sum(len(text.encode("utf-8")) for text in texts) / 1e6
    file = folder / "corpus.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    encoding = gpt2_tokenizer()._encoding
    ways = {
        "tiktoken encode_ordinary_batch, in memory": lambda: encoding.encode_ordinary_batch(texts, num_threads=CORES),
        "ours, .jsonl to prepared on disk": lambda: prepare_file(file),
    }
    if importlib.util.find_spec("datasets") and importlib.util.find_spec("transformers"):
        ways["datasets.map, fast tokenizer, in memory"] = hugging_face(texts)
    else:
        print("left out: datasets.map (pip install datasets transformers)")
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - start)
    return {name: size / statistics.median(values) for name, values in times.items()}


def formats_agree(folder: Path) -> bool:
    """Return True if the same documents give the same dataset from each format."""
    import pyarrow
    import pyarrow.parquet

    texts = list(documents(2, seed=2))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "same.jsonl").write_text(lines, encoding="utf-8")
    (folder / "same.jsonl.gz").write_bytes(gzip.compress(lines.encode("utf-8")))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "same.parquet", row_group_size=307)
    (folder / "same").mkdir()
    for number, text in enumerate(texts):
        (folder / f"same/{number:06d}.txt").write_bytes(text.encode("utf-8"))
    names = ("same", "same.jsonl", "same.jsonl.gz", "same.parquet")
    hashes = [prepare_file(folder / name).metadata["splits"] for name in names]
    return all(splits == hashes[0] for splits in hashes)


def preparation(overrides: list[str]) -> Callable[[], dict]:
    """Return the step that prepares a text at the point of train.py: after its imports, before Lightning's."""

    def step() -> dict:
        before = peak_memory()
        start = time.perf_counter()
        load_dataset(configure(*overrides), quiet=True)
        return {"seconds": time.perf_counter() - start, "before": before, "peak": peak_memory()}

    return step


def peak_memory() -> float:
    """Return the peak memory of this process in MB. (The kernel's ru_maxrss includes the parent's peak.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def large(megabytes: int, folder: Path) -> dict[str, dict[str, float]]:
    """Prepare a large corpus as one text and as JSON lines; return MB/s, and MB of memory before and at the peak."""
    result = {}
    for suffix in ("txt", "jsonl"):
        file = folder / f"large.{suffix}"
        with file.open("w", encoding="utf-8") as stream:
            for text in documents(megabytes):
                stream.write(text if suffix == "txt" else json.dumps({"text": text}) + "\n")
        for tokenizer in ("gpt2", "bpe"):
            overrides = ["data=text", f"data.path={file}", f"data.cache={folder / 'large'}", f"tokenizer={tokenizer}"]
            worker = Worker(f".{suffix}, {tokenizer}", preparation, overrides=overrides)
            worker.run(1)
            worker.close()
            facts = worker.facts
            result[worker.name] = {"MB/s": megabytes / facts["seconds"]} | {k: facts[k] for k in ("before", "peak")}
        file.unlink()
    return result


def sparse(folder: Path, tokens: int) -> Path:
    """Write a dataset of zeros that takes no space on the disk."""
    tokenizer = byte_tokenizer()
    splits = {}
    for split, length in {"train": tokens, "validation": 1000}.items():
        with (folder / f"{split}.bin").open("w+b") as stream:
            stream.truncate(2 * length)
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        counts = {"tokens": length, "bytes": length, "documents": 1}
        splits[split] = counts | {"files": [[f"{split}.bin", length, digest]]}
    metadata = {"key": {"tokenizer": {}}, "tokenizer": tokenizer.sha256, "splits": splits}
    write_checked_json(folder / "dataset.json", metadata)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer.to_dict()))
    return folder


def opening(folder: Path) -> dict[str, float]:
    """Return the seconds to open a dataset of 10 GB, and to make the first batch of a billion sequences."""
    seconds = {}
    large_dataset = folder / "ten"
    large_dataset.mkdir()
    sparse(large_dataset, 5 * 10**9)
    for attempt in ("the first time", "again"):
        start = time.perf_counter()
        token_dataset.open_cached(large_dataset)
        seconds[f"open 10 GB {attempt}"] = time.perf_counter() - start
    billion = folder / "billion.bin"
    tokens = 128 * 10**9 + 1
    with billion.open("wb") as stream:
        stream.truncate(2 * tokens)
    train = TokenSequence([map_tokens(billion, "uint16", 0, tokens)])
    start = time.perf_counter()
    idx, _ = training_batch([train], (token_dataset.MIXTURE_BLOCK,), 1, 0, 8, 128)
    seconds["first batch of 10^9 sequences"] = time.perf_counter() - start
    assert idx.shape == (8, 128)
    return seconds


def main() -> None:
    arguments = make_parser(__doc__)
    arguments.add_argument("--megabytes", type=float, default=24, help="of text, for the comparison")
    arguments.add_argument("--large", type=int, default=150, help="megabytes of the large corpus; 0 leaves it out")
    args = arguments.parse_args()
    print(describe_machine())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        speeds = throughput(args.megabytes, folder)
        fastest = next(iter(speeds.values()))
        head = f"{args.megabytes:g} MB on {CORES} cores, medians of {ROUNDS}"
        print(
            format_table([head, "MB/s", "/ tiktoken"], [[way, speed, speed / fastest] for way, speed in speeds.items()])
        )
        agree = formats_agree(folder)
        print(f"\nthe same tokens from .txt, .jsonl, .jsonl.gz and .parquet: {agree}\n")
        seconds = opening(folder)
        print(format_table(["", "ms"], [[name, 1000 * value] for name, value in seconds.items()]))
        prepared = large(args.large, folder) if args.large else {}
        if prepared:
            rows = [[name, *figures.values()] for name, figures in prepared.items()]
            print("\n" + format_table([f"{args.large} MB", "MB/s", "MB held before", "at the peak"], rows))
    report = {"cores": CORES, "MB/s": speeds, "same tokens": agree, "seconds": seconds, "large corpus": prepared}
    write_report(report, args.json)


if __name__ == "__main__":
    main()
