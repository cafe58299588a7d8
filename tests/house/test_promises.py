"""Each promise of docs/runs.md, under "Nothing is lost", and of docs/security.md has a test that fails if it is broken.

Such a test bears the marker `promise("PAGE#WORDS")`. WORDS occur in one sentence of the page.
"""

import ast
import re
import shutil
from pathlib import Path

import pytest

from gpt.data.corpus import DataConfig
from gpt.data.dataset_cache import read_checked_json, write_checked_json
from gpt.data.prepare import prepare
from gpt.data.tokenizer import TokenizerConfig
from gpt.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("runs.md", "security.md")
# Sentences that promise nothing. No one has tried the first three on a GPU.
NO_PROMISE = ("On CUDA, `trainer.deterministic=true`", "Without it,", "Neither has", "Not promised")


def promise_sentences(page: str) -> list[str]:
    """Return the sentences of the last section of a page."""
    section = (ROOT / "docs" / page).read_text(encoding="utf-8").rpartition("\n\n## ")[2]
    text = " ".join(section.split("\n", 1)[1].split())
    return [part for part in re.split(r"(?<=\.)\s+(?=[A-Z`])", text) if not part.startswith(NO_PROMISE)]


def read_markers() -> list[str]:
    """Return the arguments of every `promise` marker on a test."""
    source = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    decorators = re.findall(r"^@pytest\.mark\.promise(\(.*?\))$", source, re.MULTILINE | re.DOTALL)
    return [name for decorator in decorators for name in ast.literal_eval(f"[{decorator[1:-1]}]")]


def test_every_promise_has_a_test_and_every_marker_a_promise():
    """Without a test, delete the sentence. A marker whose words are in no sentence or in two is refused."""
    sentences = {page: promise_sentences(page) for page in PAGES}
    tested = set()
    for marker in read_markers():
        page, _, words = marker.partition("#")
        matches = [sentence for sentence in sentences[page] if words in sentence]
        assert len(matches) == 1, marker
        tested.add((page, matches[0]))
    promises = {(page, sentence) for page in PAGES for sentence in sentences[page]}
    assert promises - tested == set()


@pytest.mark.promise("security.md#dataset.json")
def test_names_in_a_dataset_are_not_followed(tmp_path):
    """Anyone can write a sealed dataset.json. It may name only the files of its tokens, in its own folder."""
    (tmp_path / "text.txt").write_text("to be or not to be " * 50)
    made, cache = tmp_path / "made", tmp_path / "cache"
    config = DataConfig("text", str(tmp_path / "text.txt"))
    prepare(config, TokenizerConfig("byte"), 8, cache, to=made)

    def opened() -> list[int]:
        [source] = prepare(DataConfig("tokens", str(made)), TokenizerConfig(), 8, cache).sources
        return source.train[:].tolist()

    tokens, metadata = opened(), read_checked_json(made / "dataset.json")
    files = metadata["splits"]["train"]["files"]
    [[name, *described]] = files
    secret = shutil.copy(made / name, tmp_path / "secret.bin")
    names = ("../secret.bin", str(secret), "../made/" + name, "sub/" + name, name + "\n", "tokenizer.json", 7)
    for changed in (*([other, *described] for other in names), [name, described[0], "../" * 22]):  # a copy's name
        files[0] = changed
        write_checked_json(made / "dataset.json", metadata)
        with pytest.raises(UserError, match="is damaged"):
            opened()
    files[0] = [name, *described]
    write_checked_json(made / "dataset.json", metadata)
    assert opened() == tokens
    (made / name).unlink()
    (made / name).symlink_to(secret)
    with pytest.raises(UserError, match=rf"{name}: cannot be read \(it is a link out of its folder\)"):
        opened()


@pytest.mark.promise("security.md#Lightning releases")
def test_unsafe_releases_are_excluded():
    """Lightning comes after the malicious 2.6.2 and 2.6.3 and the unsafe loading up to 2.6.5."""
    (low,) = re.findall(r'"lightning>=([\d.]+),<3"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert tuple(map(int, low.split("."))) >= (2, 6, 6)
