"""docs/attention.md: its code runs and prints what the page says, and its pictures are those of its tensors."""

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SPEC = importlib.util.spec_from_file_location("draw", DOCS / "draw.py")
assert SPEC is not None and SPEC.loader is not None
DRAW = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(DRAW)


def test_pictures():
    """Each picture in the folder is drawn by the page, and is what the page draws."""
    drawn = DRAW.pictures()
    assert sorted(drawn) == sorted((DOCS / "attention").iterdir())
    for file, text in drawn.items():
        assert file.read_text(encoding="utf-8") == text, f"{file.name} is old: run python docs/draw.py"


def test_other_output_is_found(tmp_path):
    """A page that says something else than its code prints is refused."""
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(2 + 3)\n```\n```\n7\n```\n")
    with pytest.raises(ValueError, match=r"says '7\\n' where its code prints '5\\n'"):
        DRAW.pictures(page)
