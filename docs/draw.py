"""Run the code of attention.md, check what it prints, and draw each of its pictures: python docs/draw.py

A picture `![name](attention/name.svg)` shows the tensor `name`, as it is after the blocks above it.
"""

import contextlib
import io
import re
from pathlib import Path

from torch import Tensor

PAGE = Path(__file__).with_name("attention.md")
PART = re.compile(
    r"```python\n(?P<code>.*?)```\n(?:```\n(?P<printed>.*?)```)?|!\[(?P<name>\w+)\]\((?P<file>.*?)\)", re.S
)
WIDTH, HEIGHT, GAP = 58, 26, 24  # of a cell, and between the heads, in pixels
STYLE = "text{font:13px ui-monospace,monospace;fill:#1f2328}@media(prefers-color-scheme:dark){text{fill:#e6edf3}}"


def pictures(page: Path = PAGE) -> dict[Path, str]:
    """Run the page; return the text of each picture's file. `ValueError` where it prints other than it says."""
    names: dict = {}
    drawn = {}
    for part in PART.finditer(page.read_text(encoding="utf-8")):
        if part["code"] is None:
            drawn[page.parent / part["file"]] = draw(names[part["name"]])
            continue
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(part["code"], names)
        if out.getvalue() != (part["printed"] or ""):
            raise ValueError(f"{page}: says {part['printed']!r} where its code prints {out.getvalue()!r}")
    return drawn


def draw(matrices: Tensor) -> str:
    """Draw a matrix (rows, columns), or several (n, rows, columns) side by side, as an SVG picture."""
    if matrices.dim() == 2:
        matrices = matrices[None]
    count, rows, columns = matrices.shape
    largest = float(matrices.abs().max())
    cells = []
    for i, matrix in enumerate(matrices.tolist()):
        for r, row in enumerate(matrix):
            for c, value in enumerate(row):
                x, y = i * (columns * WIDTH + GAP) + c * WIDTH, r * HEIGHT
                hue, strength = "#3b82f6" if value > 0 else "#f59e0b", 0.9 * abs(value) / largest
                cells.append(
                    f'<rect x="{x}" y="{y}" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="3" '
                    f'fill="{hue}" fill-opacity="{strength:.2f}"/>'
                    f'<text x="{x + WIDTH / 2 - 1:g}" y="{y + 17}" text-anchor="middle">'
                    f"{f'{value:.2f}' if value else '.'}</text>"
                )
    width, height = count * (columns * WIDTH + GAP) - GAP, rows * HEIGHT
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *cells, "</svg>\n"])


if __name__ == "__main__":
    for file, text in pictures().items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
        print(file)
