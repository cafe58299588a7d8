"""Text and tokens in a bucket of a real S3 server on loopback: what local files of the same content give."""

import gzip
import json
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gpt.data.corpus import open_corpus
from gpt.data.data_config import DataConfig
from gpt.data.prepare import prepare
from gpt.data.tokenizer import TokenizerConfig

pytestmark = pytest.mark.slow

WORDS = random.Random(5).choices(["naïve", "€", "😀", "alpha", "beta", "\n"], k=3_000)
TEXTS = [" ".join(WORDS[i : i + 600]) for i in range(0, 3_000, 600)]


def test_objects_equal_local_files(s3, tmp_path, fill):
    """Files of every format give the documents, hash and tokens of local files. So do token files with an index."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:2])
    folder = fill(tmp_path / "local", **{"a#1__txt": TEXTS[2], "b_in_e__txt": TEXTS[4]})
    (folder / "b/lines.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pq.write_table(pa.table({"text": TEXTS}), folder / "b/table.parquet")
    (folder / "c").mkdir()
    np.arange(256, dtype="<u2").tofile(folder / "c/0.ds")
    np.array([256], "<u8").tofile(folder / "c/0.ds.index")
    s3.put(f"{folder}/", "texts/all/", recursive=True)
    results = []
    for root, cache in (("s3://texts/all", tmp_path / "1"), (folder, tmp_path / "2")):
        names = ["b/e.txt", "a#1.txt", "b/lines.jsonl.gz", "b/table.parquet", "b/e.txt"]
        data = DataConfig("text", [f"{root}/{name}" for name in names])
        corpus = open_corpus(data, cache, [].append)
        documents = ["".join(blocks) for file in corpus.files for blocks, _ in corpus.read(file, 0)]
        [text] = prepare(data, TokenizerConfig("bpe", 300), 7, cache, [].append).sources
        [tokens] = prepare(DataConfig("tokens", f"{root}/c"), TokenizerConfig("byte"), 7, cache, [].append).sources
        results.append((documents, corpus.sha256(cache), text.metadata["splits"], bytes(text.train[:])))
        results[-1] += (tokens.metadata["key"], tokens.train[:].tolist(), tokens.validation.tolist())
    assert results[0] == results[1]
    assert len(results[0][0]) == 9
    assert results[0][-2] + results[0][-1] == list(range(256))


def test_an_object_that_is_stored_packed(s3, tmp_path):
    """The store unpacks nothing: an object with a Content-Encoding arrives as it is stored."""
    text = "".join(TEXTS)
    with s3.open("texts/book.txt", "wb", ContentEncoding="gzip") as stream:
        stream.write(gzip.compress(text.encode()))
    corpus = open_corpus(DataConfig("text", "s3://texts/book.txt"), tmp_path, [].append)
    assert ["".join(blocks) for blocks, _ in corpus.read(corpus.files[0], 0)] == [text]
