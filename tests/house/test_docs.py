"""attention.md and model.md: their code runs and prints what the pages say, and their pictures show their tensors."""

import importlib.util
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SPEC = importlib.util.spec_from_file_location("draw", DOCS / "draw.py")
assert SPEC is not None and SPEC.loader is not None
DRAW = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(DRAW)


@pytest.mark.parametrize("page", DRAW.PAGES, ids=lambda page: page.stem)
def test_pictures(page):
    """Each picture in a page's folder is drawn by it, and is what it draws but for what another processor rounds."""
    drawn = DRAW.pictures(page)
    assert sorted(drawn) == sorted((DOCS / page.stem).iterdir())
    for file, text in drawn.items():
        there, now = (re.split(r"(-?\d\.\d\d)\b", one) for one in (file.read_text(encoding="utf-8"), text))
        assert there[::2] == now[::2], f"{file.name} is old: run python docs/draw.py"
        assert [float(one) for one in now[1::2]] == pytest.approx([float(one) for one in there[1::2]], abs=0.05)


def test_other_output_is_found(tmp_path):
    """A page that says something else than its code prints is refused."""
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(2 + 3)\n```\n```\n7\n```\n")
    with pytest.raises(ValueError, match=r"shows '7\\n', but its code prints '5\\n'"):
        DRAW.pictures(page)
