"""Run the code of attention.md and model.md, check what it prints, and draw each picture: python docs/draw.py

A picture `![name](attention/name.svg)` shows the tensor `name` after the blocks above it, with a row for each of the
page's `words`. Its columns are these words or the page's `vocabulary` if their number fits, otherwise numbers.
"""

import contextlib
import io
import re
from html import escape
from pathlib import Path

from torch import Tensor

PAGES = [Path(__file__).with_name(name) for name in ("attention.md", "model.md")]
PART = re.compile(
    r"```python\n(?P<code>.*?)```\n(?:```\n(?P<printed>.*?)```)?|!\[(?P<name>\w+)\]\((?P<file>.*?)\)", re.S
)
WIDTH, HEIGHT = 58, 26  # of a cell, in pixels
GAP = 24  # pixels between heads
LEFT, TOP = 74, 46  # pixels for the words
STYLE = (
    "text{font:13px ui-monospace,monospace;fill:#1f2328}.axis{fill:#59636e}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.axis{fill:#9198a1}}"
)


def pictures(page: Path) -> dict[Path, str]:
    """Run the page. Return the text of each picture's file. `ValueError` if the code prints something else."""
    names: dict = {}
    drawn = {}
    for part in PART.finditer(page.read_text(encoding="utf-8")):
        if part["code"] is None:
            drawn[page.parent / part["file"]] = draw(names[part["name"]], names["words"], names.get("vocabulary", []))
            continue
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(part["code"], names)
        if out.getvalue() != (part["printed"] or ""):
            raise ValueError(f"{page}: shows {part['printed']!r}, but its code prints {out.getvalue()!r}")
    return drawn


def draw(matrices: Tensor, words: list[str], vocabulary: list[str]) -> str:
    """Return an SVG picture of a matrix (rows, columns), or of one matrix per head (n, rows, columns)."""
    heads = matrices.dim() == 3
    matrices = matrices.detach().view(-1, *matrices.shape[-2:])
    count, rows, columns = matrices.shape
    largest = float(matrices.abs().max())
    about, titles = "numbers of its vector", [str(c + 1) for c in range(columns)]
    if columns == len(words):
        about, titles = "looked at", words
    elif columns == len(vocabulary):
        about, titles = "what comes next", vocabulary
    cells = [_words(LEFT - 10, 14, "looking \u2193" if titles is words else "", "end", "axis")]
    cells += [_words(LEFT - 10, TOP + r * HEIGHT + 17, words[r], "end") for r in range(rows)]
    for i, matrix in enumerate(matrices.tolist()):
        left = LEFT + i * (columns * WIDTH + GAP)
        cells.append(_words(left, 14, f"head {i + 1}, " * heads + f"{about} \u2192", "start", "axis"))
        for c, title in enumerate(titles):
            cells.append(_words(left + c * WIDTH + WIDTH / 2 - 1, TOP - 9, title, "middle"))
        for r, row in enumerate(matrix):
            for c, value in enumerate(row):
                x, y = left + c * WIDTH, TOP + r * HEIGHT
                written = f"{value:.2f}".replace("-0.00", "0.00") if value else "."
                hue, strength = "#3b82f6" if value > 0 else "#f59e0b", 0.9 * abs(value) / largest
                cells.append(
                    f'<rect x="{x}" y="{y}" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="3" '
                    f'fill="{hue}" fill-opacity="{strength:.2f}"/>'
                    + _words(x + WIDTH / 2 - 1, y + 17, written, "middle")
                )
    width, height = LEFT + count * (columns * WIDTH + GAP) - GAP, TOP + rows * HEIGHT
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *cells, "</svg>\n"])


def _words(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{kind}>{escape(text)}</text>'


if __name__ == "__main__":
    for page in PAGES:
        for file, text in pictures(page).items():
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
            print(file)
