"""The standard library as text: English, all of it, and the same whatever runs in the process."""

import io
import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from gpt.data import python_docs as stdlib
from gpt.data.corpus import Corpus, open_corpus
from gpt.data.data_config import DataConfig
from gpt.data.python_docs import builtin_docs, find_modules, read_docstrings, read_source
from harness import refusal

NOWHERE = Path("no cache is needed")


def documents_of(corpus: Corpus) -> list[str]:
    """The documents that are not empty, which are those that have pieces."""
    documents: list[str] = []
    for _, _, piece in corpus.chunks():
        documents += [piece.text] if piece.starts_document else [documents.pop() + piece.text]
    return documents


def assert_english(documents: list[str]) -> None:
    """Nearly all ASCII, and the commonest words are those of English."""
    text = "".join(documents)
    assert sum(character.isascii() for character in text) > 0.99 * len(text)
    assert "the" in [word for word, _ in Counter(re.findall("[a-z]+", text)).most_common(3)]


@pytest.mark.slow
def test_python_docs():
    """More than a megabyte of English in hundreds of documents, none of them blank.

    They are docstrings of Python, the topics of the language reference, and last the docstrings of what is in C.
    """
    documents = documents_of(open_corpus(DataConfig(), NOWHERE))
    assert sum(len(document.encode()) for document in documents) > 1_000_000
    assert len(documents) > 300
    assert all(document.strip() for document in documents)
    assert all(document.endswith("\n") for document in documents)
    assert_english(documents)
    assert sum(document.startswith('The "assert" statement\n') for document in documents) == 1
    assert sum(document.startswith("json\n\nJSON (JavaScript Object Notation)") for document in documents) == 1
    assert sum("\n\nbuiltins.len\n\nReturn the number of items in a container." in text for text in documents) == 1
    builtin = [document for document in builtin_docs() if document]
    assert documents[-len(builtin) - 1 :] == [*read_docstrings(find_modules()[-1]), *builtin]


def test_docstrings_by_hand(tmp_path, monkeypatch):
    """Classes, methods, functions of both kinds and what is inside them; what has no docstring gives nothing."""
    monkeypatch.setattr(stdlib.sysconfig, "get_path", {"stdlib": str(tmp_path)}.__getitem__)
    (tmp_path / "shop").mkdir()
    module = tmp_path / "shop" / "till.py"
    module.write_text(
        'class Till:\n    """Keeps\n    money."""\n    def take(self, n: int = 7) -> int:\n        """Take it."""\n'
        '        def inner():\n            """Inside."""\n    async def wait(self, *, s):\n        """Wait. """\n'
        "def silent(): pass\n"
    )
    assert list(read_docstrings(module)) == [
        "shop.till.Till\n\nKeeps\nmoney.\n\nshop.till.Till.take(self, n: int=7)\n\nTake it.\n\n"
        "shop.till.Till.take.inner()\n\nInside.\n\nshop.till.Till.wait(self, *, s)\n\nWait.\n"
    ]
    module.with_name("__init__.py").write_text("'The shop.'")
    assert list(read_docstrings(module.with_name("__init__.py"))) == ["shop\n\nThe shop.\n"]
    module.write_text("x = 7\n")
    assert list(read_docstrings(module)) == []


def test_python_docs_do_not_depend_on_the_process(monkeypatch):
    """Documents match the hash even if a program has replaced sys.stderr."""
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    first = list(builtin_docs())
    assert first == list(builtin_docs())
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert first == list(builtin_docs())


def test_python_stdlib():
    """More than five megabytes of source, without tests."""
    documents = documents_of(open_corpus(DataConfig("python_stdlib"), NOWHERE))
    assert sum(len(document.encode()) for document in documents) > 5_000_000
    assert all(documents)
    assert Path(json.__file__).read_text(encoding="utf-8") in documents
    assert_english(documents)


def test_interpreter_without_sources(tmp_path, monkeypatch):
    """An interpreter that was installed without its library as text."""
    monkeypatch.setattr(stdlib.sysconfig, "get_path", {"stdlib": str(tmp_path)}.__getitem__)
    for name in ("python_docs", "python_stdlib"):
        assert refusal(open_corpus, DataConfig(name), NOWHERE) == (
            f"{tmp_path} holds no Python sources, so this interpreter has no documentation: use data=text"
        )


def test_source_in_its_own_encoding(tmp_path):
    """A module is decoded by its encoding declaration."""
    file = tmp_path / "a.py"
    file.write_bytes(b"# -*- coding: latin-1 -*-\nname = 'caf\xe9'\n")
    assert list(read_source(file)) == ["# -*- coding: latin-1 -*-\nname = 'café'\n"]


def test_hash_follows_the_interpreter(tmp_path):
    """Both corpora have the same files and other documents; what is built in changes with the version."""
    docs, sources = (open_corpus(DataConfig(name), NOWHERE) for name in ("python_docs", "python_stdlib"))
    assert docs.files == sources.files
    assert docs.sha256(tmp_path) != sources.sha256(tmp_path)
    assert docs.version == sys.version
