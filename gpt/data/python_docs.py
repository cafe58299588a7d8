"""The standard library of the running Python as text: English, and available everywhere."""

import ast
import importlib
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path

from gpt.errors import UserError

_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "turtledemo", "__pycache__"}


def find_modules() -> tuple[Path, ...]:
    """Return the source files of the standard library's modules, without tests, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    modules = tuple(p for p in sorted(root.rglob("*.py")) if not _NOT_LIBRARY & set(p.relative_to(root).parts))
    if not modules:
        raise UserError(f"{root} holds no Python sources, so this interpreter has no documentation: use data=text")
    return modules


def read_source(file: Path) -> Iterator[str]:
    """Yield a module's source, decoded by its own encoding declaration."""
    with tokenize.open(file) as stream:
        yield stream.read()


def read_docstrings(file: Path) -> Iterator[str]:
    """Yield a module's docstrings as one document, or each topic of the language reference as its own."""
    if file.parent.name == "pydoc_data":
        if file.stem == "topics":
            from pydoc_data.topics import topics

            yield from (topics[name].strip() + "\n" for name in sorted(topics))
        return
    root = Path(sysconfig.get_path("stdlib"))
    module = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    tree = ast.parse(file.read_bytes())
    entries = list(_docstrings(tree, module))
    if entries:
        yield "\n\n".join(f"{title}\n\n{docstring.strip()}" for title, docstring in entries) + "\n"


def _docstrings(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Yield (title, docstring) of a module, class or function and of everything inside it, in source order."""
    title = name
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        title = f"{name}({ast.unparse(node.args)})"
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        if docstring := ast.get_docstring(node):
            yield title, docstring
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _docstrings(child, f"{name}.{child.name}")


def builtin_docs() -> Iterator[str]:
    """Yield the docstrings of each module that is built into the interpreter as one document."""
    for module_name in sorted(sys.builtin_module_names):
        with warnings.catch_warnings(action="ignore"):  # some modules are deprecated
            module = importlib.import_module(module_name)
        titles: dict[str, str] = {}  # of each docstring
        for name, value in sorted(vars(module).items()):
            if name.endswith("hook"):  # programs replace sys.excepthook and the like
                continue
            members = sorted(vars(value).items()) if isinstance(value, type) else ()
            for title, member in [(name, value), *((f"{name}.{inner}", v) for inner, v in members)]:
                docstring = getattr(member, "__doc__", None)
                if isinstance(docstring, str) and callable(value) and not name.startswith("__"):
                    titles.setdefault(docstring.strip(), title)
        entries = [f"{module_name}.{title}\n\n{docstring}" for docstring, title in titles.items() if docstring]
        yield "\n\n".join(entries) + "\n" if entries else ""
