"""The code in attention.md and model.md prints what the pages show, and draws their pictures."""

import importlib.util
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SPEC = importlib.util.spec_from_file_location("draw", DOCS / "draw.py")
assert SPEC is not None and SPEC.loader is not None
DRAW = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(DRAW)


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.stem, marks=pytest.mark.slow if page.stem == "model" else ()) for page in DRAW.PAGES],
)
def test_pictures(page):
    """The page draws every picture in its folder. Only the last digits may differ, by the rounding of a processor."""
    pictures = DRAW.pictures(page)
    assert sorted(pictures) == sorted((DOCS / page.stem).iterdir())
    for file, text in pictures.items():
        stored, new = (re.split(r"(-?\d\.\d\d)\b", source) for source in (file.read_text(encoding="utf-8"), text))
        assert stored[::2] == new[::2], f"{file.name} is old: run python docs/draw.py"
        assert list(map(float, new[1::2])) == pytest.approx(list(map(float, stored[1::2])), abs=0.05)


def test_other_output_is_found(tmp_path):
    """A page is refused if its code prints something else."""
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(2 + 3)\n```\n```\n7\n```\n")
    with pytest.raises(ValueError, match=r"shows '7\\n', but its code prints '5\\n'"):
        DRAW.pictures(page)
