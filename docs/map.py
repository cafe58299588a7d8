"""Print the first line of each file's docstring: python docs/map.py [FOLDER]"""

import ast
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def first_line(file: Path) -> str:
    """Return the first line of a file's docstring, or raise `ValueError` if it has none."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    if not docstring:
        raise ValueError(f"{file} has no docstring: write in one line what it does")
    return docstring.splitlines()[0].rstrip(".")


def lines(folder: Path, depth: int = 0) -> Iterator[str]:
    """Yield a line for the folder, one for each file in it, and then the folders in it."""
    package = folder / "__init__.py"
    yield f"{'  ' * depth + folder.name + '/':28} {first_line(package) if package.exists() else ''}".rstrip()
    for file in sorted(folder.glob("*.py")):
        if file != package:
            yield f"{'  ' * (depth + 1) + file.name:28} {first_line(file)}"
    for inner in sorted(folder.iterdir()):
        if inner.is_dir() and any(inner.rglob("*.py")):
            yield from lines(inner, depth + 1)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # of | head
        for folder in sys.argv[1:] or ["gpt"]:
            print("\n".join(lines(ROOT / folder)), flush=True)
