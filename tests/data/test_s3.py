"""Text in a bucket of a real S3 server on loopback: what local files of the same content give, in bounded disk."""

import gzip
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gpt.data.corpus import open_corpus
from gpt.data.data_config import DataConfig
from gpt.data.prepare import prepare
from gpt.data.tokenizer import TokenizerConfig
from harness import refusal

pytestmark = pytest.mark.slow

WORDS = random.Random(5).choices(["naïve", "€", "😀", "alpha", "beta", "\n"], k=30_000)
TEXTS = [" ".join(WORDS[i : i + 6_000]) for i in range(0, 30_000, 6_000)]


@pytest.fixture
def here(s3, tmp_path, fill) -> Path:
    """A local folder of all kinds of files, which the bucket has too."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:2])
    names = {"a#1__txt": TEXTS[2], "b-c_in_d__txt": TEXTS[3], "b_in_e__txt": TEXTS[4], "b_in_empty__md": ""}
    folder = fill(tmp_path / "here", **names, b_in___hidden_in_f__txt="hidden", b_in___g__txt="hidden")
    (folder / "b/lines.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pq.write_table(pa.table({"text": TEXTS}), folder / "b/table.parquet")
    s3.put(f"{folder}/", "texts/all/", recursive=True)
    return folder


def texts_of(data: DataConfig, cache: Path) -> list[str]:
    corpus = open_corpus(data, cache, [].append)
    return ["".join(blocks) for file in corpus.files for blocks, _ in corpus.read(file, 0)]


@pytest.mark.parametrize(
    ("paths", "num_documents"),
    [
        (["b/e.txt", "a#1.txt", "b/lines.jsonl.gz", "b/table.parquet", "b/e.txt"], 9),
        ([""], 10),
        (["**/[a-d]*.txt"], 2),
    ],
    ids=["list", "folder", "glob"],
)
def test_objects_equal_local_files(s3, here, tmp_path, paths, num_documents):
    """Files, folders and globs of every format give the documents, hash and tokens of local files."""
    results = []
    for root, cache in (("s3://texts/all", tmp_path / "1"), (here, tmp_path / "2")):
        data = DataConfig("text", [f"{root}/{path}" for path in paths])
        [source] = prepare(data, TokenizerConfig("bpe", 300), 7, cache, [].append).sources
        sha256 = open_corpus(data, cache, [].append).sha256(cache)
        results.append((texts_of(data, cache), sha256, source.metadata["splits"], bytes(source.train[:])))
    assert results[0] == results[1]
    assert len(results[0][0]) == num_documents


def test_bounded_disk(s3, here, tmp_path):
    """Copies of two of five files fit: all is read, as often as need be, and they never take more than they may."""
    sizes = []
    for i, text in enumerate(TEXTS):
        s3.pipe_file(f"texts/five/{i}.txt", text.encode())
        sizes.append(len(text.encode()))
    cache_bytes = 2 * max(sizes) + min(sizes) // 2
    data = DataConfig("text", "s3://texts/five", cache_bytes=cache_bytes)
    corpus, most = open_corpus(data, tmp_path, [].append), []
    for _ in range(2):
        assert "".join(piece.text for _, _, piece in corpus.chunks()) == "".join(TEXTS)
    for _ in corpus.chunks():
        copies = [file for file in (tmp_path / "downloads").iterdir() if not file.name.startswith(".")]
        most.append(sum(file.stat().st_size for file in copies))
    assert min(sizes) < max(most) <= cache_bytes
    [source] = prepare(data, TokenizerConfig("byte"), 7, tmp_path, [].append).sources
    [whole] = prepare(DataConfig("text", "s3://texts/five"), TokenizerConfig("byte"), 7, tmp_path / "2").sources
    assert source.metadata["splits"] == whole.metadata["splits"]
    assert len({file.name for file in (tmp_path / "2/downloads").glob("*.txt")}) == 5
    line = refusal(texts_of, DataConfig("text", "s3://texts/five", cache_bytes=99), tmp_path / "3")
    assert line == f"data.cache_bytes=99 does not hold s3://texts/five/0.txt, of {sizes[0]:,} bytes: raise it"


@pytest.mark.parametrize(
    ("path", "end"),
    [
        ("texts/no", "cannot be used (FileNotFoundError: texts/no); there is no such file: check the spelling"),
        ("none/a", "cannot be used (FileNotFoundError: The specified bucket does not exist); there is no such file: "),
        ("texts/*.zip", "names no file: give the URL of a file, a folder or a quoted glob"),
        ("none/*.zip", "names no file: give the URL of a file, a folder or a quoted glob"),
    ],
)
def test_no_such_object(s3, tmp_path, path, end):
    """One line names the URL and what to do."""
    line = refusal(texts_of, DataConfig("text", f"s3://{path}"), tmp_path)
    assert f"s3://{path}" in line and end in line


def test_no_credentials(s3, here, tmp_path, monkeypatch):
    """One line says how to give them."""
    url = "s3://texts/all/b/e.txt"
    for key in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.delenv(f"AWS_{key}")
    s3.clear_instance_cache()
    assert refusal(texts_of, DataConfig("text", url), tmp_path) == (
        f"{url}: cannot be used (NoCredentialsError: Unable to locate credentials); log in with the "
        "store's own tool, such as aws, gcloud or hf, or check the spelling"
    )
