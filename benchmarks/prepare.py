"""How fast text becomes tokens, in how much memory: python benchmarks/prepare.py [--large 1000] [--json].

In one run and in turn, over the same documents of Python's documentation: tiktoken's own batch encoding of documents in
memory, ours from a file to verified shards on disk, and Hugging Face's `datasets.map` with a fast tokenizer. Then a
large corpus in a process of its own, whose peak memory is taken, and shards too large to read, which are opened.
"""

import argparse
import gzip
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gpt.text import python_docs as stdlib
from gpt.text import shards  # noqa: E402
from gpt.text.batches import corpus_batch  # noqa: E402
from gpt.text.corpus import DataConfig  # noqa: E402
from gpt.text.prepare import prepare  # noqa: E402
from gpt.text.tokenizer import TokenizerConfig, byte_tokenizer, gpt2_tokenizer  # noqa: E402

ROUNDS = 3
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def documents(megabytes: float, seed: int = 1):
    """Stretches of Python's documentation of a few hundred to many thousand characters."""
    everything = "\n".join(text for file in stdlib.files() for text in stdlib.read_docstrings(file))
    chance = random.Random(seed)
    left = megabytes * 1e6
    while left > 0:
        length = min(int(chance.lognormvariate(7.6, 1)), len(everything) // 2)
        start = chance.randrange(len(everything) - length)
        yield everything[start : start + length]
        left -= length


def prepare_file(path: Path, **settings) -> shards.Shards:
    """Prepare a text in a cache that is thrown away but for what is returned."""
    cache = tempfile.mkdtemp(dir=path.parent)
    data = DataConfig("text", str(path), **settings)
    return prepare(data, TokenizerConfig("gpt2"), 128, Path(cache), say=lambda line: None).sources[0]


def hugging_face(texts: list[str]) -> Callable[[], object]:
    """`datasets.map` with GPT-2's tokenizer, as its documentation does it, over the same documents in memory."""
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
    """GPT-2's encoding in the `tokenizers` library, whose merges follow from the ranks."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from gpt.text.tokenizer import _bytes_by_stand_in

    stand_in = {byte: character for character, byte in _bytes_by_stand_in().items()}
    ranks = gpt2_tokenizer()._ranks

    def spell(token: bytes) -> str:
        return "".join(stand_in[byte] for byte in token)

    merges = []
    for token, rank in ranks.items():
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pairs = [ranks.get(left + right, rank) for left, right in itertools.pairwise(parts)]
            at = pairs.index(min(pairs))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append((spell(parts[0]), spell(parts[1])))
    tokenizer = Tokenizer(models.BPE({spell(token): rank for token, rank in ranks.items()}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def throughput(megabytes: float, folder: Path) -> dict[str, float]:
    """MB/s of each, medians of rounds in turn."""
    texts = list(documents(megabytes))
    size = sum(len(text.encode("utf-8")) for text in texts) / 1e6
    file = folder / "corpus.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    encoding = gpt2_tokenizer()._encoding
    ways = {
        "tiktoken encode_ordinary_batch, in memory": lambda: encoding.encode_ordinary_batch(texts, num_threads=CORES),
        "ours, .jsonl to shards on disk": lambda: prepare_file(file),
        "datasets.map, fast tokenizer, in memory": hugging_face(texts),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - start)
    return {name: size / statistics.median(values) for name, values in times.items()}


def formats_agree(folder: Path) -> bool:
    """Whether the same documents give the same shard files from each format."""
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
    hashes = [prepare_file(folder / name).manifest["splits"] for name in names]
    return all(splits == hashes[0] for splits in hashes)


LARGE = """
import json, sys, time
sys.path.insert(0, {root!r})
import train
from pathlib import Path
from gpt.text.corpus import DataConfig
from gpt.text.prepare import prepare
from gpt.text.tokenizer import TokenizerConfig

def peak():  # of this program: the kernel's other figure begins with that of the parent
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

before = peak()
start = time.perf_counter()
prepare(DataConfig("text", {file!r}), TokenizerConfig({tokenizer!r}), 128, Path({cache!r}), say=lambda line: None)
seconds = time.perf_counter() - start
print(json.dumps([before, peak(), seconds]))
"""


def large(megabytes: int, folder: Path) -> dict[str, list[float]]:
    """[MB before, MB at peak, MB/s] of a training's process that prepares a large corpus, as one text and as lines."""
    result = {}
    for kind in ("txt", "jsonl"):
        file = folder / f"large.{kind}"
        with file.open("w", encoding="utf-8") as stream:
            for text in documents(megabytes):
                stream.write(text if kind == "txt" else json.dumps({"text": text}) + "\n")
        for tokenizer in ("gpt2", "bpe"):
            code = LARGE.format(root=str(ROOT), file=str(file), tokenizer=tokenizer, cache=str(folder / "large"))
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            before, peak, seconds = json.loads(done.stdout)
            result[f".{kind}, {tokenizer}"] = [before / 1024, peak / 1024, megabytes / seconds]
        file.unlink()
    return result


def sparse(folder: Path, tokens: int) -> Path:
    """A prepared corpus of zeros that takes no room on the disk."""
    tokenizer = byte_tokenizer()
    splits = {}
    for split, length in {"train": tokens, "validation": 1000}.items():
        size = 2 * length
        files = shards.shard_files(folder, split, -(-size // shards.SHARD_BYTES))
        for number, file in enumerate(files):
            with file.open("wb") as stream:
                stream.truncate(min(shards.SHARD_BYTES, size - number * shards.SHARD_BYTES))
        splits[split] = {"tokens": length, "bytes": length, "documents": 1, "sha256": ["0" * 64] * len(files)}
    manifest = {"key": {}, "corpus": "zeros", "tokenizer": tokenizer.sha256, "dtype": "uint16", "splits": splits}
    (folder / "manifest.json").write_text(json.dumps(manifest | {"shard_bytes": shards.SHARD_BYTES}))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer.to_dict()))
    return folder


def opening(folder: Path) -> dict[str, float]:
    """Seconds to open 10 GB of shards, and to make the first batch of a billion windows."""
    ten, billion = folder / "ten", folder / "billion"
    ten.mkdir()
    billion.mkdir()
    sparse(ten, 5 * 10**9)
    sparse(billion, 128 * 10**9 + 1)
    start = time.perf_counter()
    shards.open_shards(ten)
    opened = time.perf_counter() - start
    train = shards.open_shards(billion).train
    start = time.perf_counter()
    idx, _ = corpus_batch(train, 1, 0, 8, 128)
    first = time.perf_counter() - start
    assert idx.shape == (8, 128) and len(train) // 128 == 10**9
    return {"open 10 GB": opened, "first batch of 10^9 windows": first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=48, help="of text, for the comparison")
    parser.add_argument("--large", type=int, default=1000, help="megabytes of the large corpus; 0 leaves it out")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report = {
            "cores": CORES,
            "MB/s": throughput(args.megabytes, folder),
            "identical shards from .txt, .jsonl, .jsonl.gz, .parquet": formats_agree(folder),
            "seconds": opening(folder),
            "large corpus: [MB before, MB at peak, MB/s]": large(args.large, folder) if args.large else None,
        }
    if args.json:
        print(json.dumps(report, indent=2))
        return
    speeds = report["MB/s"]
    tiktoken = next(iter(speeds.values()))
    print(f"{CORES} cores, {args.megabytes:g} MB of text, medians of {ROUNDS}")
    for way, speed in speeds.items():
        print(f"{way:44} {speed:7.2f} MB/s {speed / tiktoken:6.2f}")
    print(f"the same shards from all formats: {report['identical shards from .txt, .jsonl, .jsonl.gz, .parquet']}")
    for what, seconds in report["seconds"].items():
        print(f"{what:44} {1000 * seconds:7.1f} ms")
    for what, (before, peak, speed) in (report["large corpus: [MB before, MB at peak, MB/s]"] or {}).items():
        print(f"{args.large} MB, {what:33} {speed:10.2f} MB/s, {before:.0f} MB before, {peak:.0f} MB at peak")


if __name__ == "__main__":
    main()
