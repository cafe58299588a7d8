"""Text in: the corpora as iterators of documents, and their split into training and validation."""

import ast
import bz2
import contextlib
import glob
import gzip
import hashlib
import importlib
import itertools
import json
import lzma
import sys
import sysconfig
import tokenize
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gpt.errors import UserError, require_choice
from gpt.text import well_formed

ENOUGH_DOCUMENTS = 20  # from this many on, validation takes whole documents
_OPENERS: dict[str, Callable] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "turtledemo", "__pycache__"}


@dataclass
class DataConfig:
    """Which text to train on, and what of it validates."""

    name: str = "python_docs"  # python_docs, python_stdlib or text
    path: str | None = None  # for text: a file, a folder or a glob
    text_field: str = "text"  # for .jsonl: the key that holds the text
    cache: str | None = None  # the folder of prepared text; by default data/cache
    validation_bytes: int = 1_000_000  # validation is a tenth of the text, at most this much
    prompts: list[str] = field(default_factory=lambda: [""])  # sampled through training; "" starts a document

    def __post_init__(self) -> None:
        require_choice("data.name", self.name, ("python_docs", "python_stdlib", "text"))
        if self.name == "text" and not self.path:
            raise ValueError("data=text needs data.path=FILE: a file, a folder or a quoted glob such as 'books/*.txt'")
        if self.name != "text" and self.path:
            raise ValueError(f"data.path={self.path!r} is read only with data=text: add it, or leave the path out")
        if self.validation_bytes < 1:
            raise ValueError(f"data.validation_bytes={self.validation_bytes} is out of range: it must be at least 1")


@dataclass(frozen=True)
class Corpus:
    """Files and the way to read documents from them; `builtin` gives further documents that lie in no file.

    `version` names whatever else decides what the documents are.
    """

    name: str
    files: tuple[Path, ...]
    read: Callable[[Path], Iterable[str]]
    builtin: Callable[[], Iterable[str]] = tuple
    version: str = ""

    def documents(self) -> Iterator[str]:
        """Every document that is not empty, always in the same order."""
        for file in self.files:
            yield from filter(None, self.read(file))
        yield from filter(None, self.builtin())

    def sha256(self) -> str:
        """The hash of all that decides the documents: cheap beside reading them, and never stale."""
        digest = hashlib.sha256(f"{self.name}\n{self.version}\n".encode())
        for file in self.files:
            digest.update("".join(file.suffixes).encode("utf-8", "replace"))  # which say how it is read
            with _explain_missing(file), file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()


def open_corpus(config: DataConfig) -> Corpus:
    """The corpus that the configuration names. Raises `UserError` where there is nothing to read."""
    if config.name == "text":
        assert config.path is not None
        files = find_text_files(config.path)
        return Corpus("text", files, lambda file: read_text(file, config.text_field), version=config.text_field)
    if config.name == "python_stdlib":
        return Corpus("python_stdlib", standard_library(), read_source)
    return Corpus("python_docs", standard_library(), read_docstrings, builtin_docs, version=sys.version)


# --- the user's own text ---


def find_text_files(path: str) -> tuple[Path, ...]:
    """The files that `path` names: itself, every text file below a folder, or what a glob matches; in sorted order.

    In a folder, hidden, empty and binary files are passed over; a file that is named must be text.
    """
    try:
        root = Path(path).expanduser()
        root.stat()
    except (FileNotFoundError, ValueError):
        pass  # it may be a glob
    except (OSError, RuntimeError) as error:
        raise UserError(f"data.path={path!r} cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if root.is_file():
        return (root,)
    if root.is_dir():
        inside = (p for p in sorted(root.rglob("*")) if p.is_file())
        found = [p for p in inside if not any(part.startswith(".") for part in p.relative_to(root).parts)]
        found = [p for p in found if p.suffix.lower() in _OPENERS or _looks_like_text(p)]
    else:
        found = [Path(name) for name in sorted(glob.glob(str(root), recursive=True)) if Path(name).is_file()]
    if not found:
        what = (
            "a folder without text files" if root.is_dir() else "neither a file, a folder, nor a glob that matches any"
        )
        raise UserError(f"data.path={path!r} is {what}: give the path of your text")
    return tuple(found)


def read_text(file: Path, text_field: str = "text") -> Iterator[str]:
    """The documents of a file: the text itself, or a document a line for .jsonl; .gz, .bz2 and .xz are unpacked."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    opener = _OPENERS.get(suffixes[-1]) if suffixes else None
    with _explain_missing(file), (opener or open)(file, "rb") as stream:
        try:
            content = stream.read()
        except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
            raise UserError(
                f"{file}: cannot be unpacked ({error}): the file is damaged or not what its name says"
            ) from None
    if not content:
        raise UserError(f"{file}: the file is empty; give a file with text in it")
    if 0 in content[:4096]:
        raise UserError(f"{file}: a binary file (a zero byte at offset {content.index(0)}); give a text file in UTF-8")
    try:
        text = content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file}: not UTF-8 (byte 0x{content[error.start]:02x} at offset {error.start}); "
            "convert it first, for example with iconv -t utf-8"
        ) from None
    if (suffixes[-2] if opener and len(suffixes) > 1 else suffixes[-1] if suffixes else "") in (".jsonl", ".ndjson"):
        yield from _json_lines(file, text, text_field)
    else:
        yield text


def _json_lines(file: Path, text: str, text_field: str) -> Iterator[str]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", "beyond what can be read")
            raise UserError(
                f"{file}: line {number} is not JSON ({reason}); every line must be one JSON object"
            ) from None
        document = record.get(text_field) if isinstance(record, dict) else None
        if not isinstance(document, str):
            raise UserError(
                f"{file}: line {number} has no text under {text_field!r}; name the key with data.text_field="
            )
        yield well_formed(document)


def _looks_like_text(file: Path) -> bool:
    with _explain_missing(file), file.open("rb") as stream:
        beginning = stream.read(4096)
    return bool(beginning) and 0 not in beginning


@contextlib.contextmanager
def _explain_missing(file: Path) -> Iterator[None]:
    """Turn a file that cannot be opened or read into one line."""
    try:
        yield
    except gzip.BadGzipFile:
        raise
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror or error})") from None


# --- the standard library of the running interpreter: always at hand, and English ---


def standard_library() -> tuple[Path, ...]:
    """Every module of the standard library as a source file, without its tests, in sorted order."""
    root = Path(sysconfig.get_path("stdlib"))
    found = tuple(p for p in sorted(root.rglob("*.py")) if not _NOT_LIBRARY & set(p.relative_to(root).parts))
    if not found:
        raise UserError(f"{root} holds no Python sources, so this interpreter has no documentation: use data=text")
    return found


def read_source(file: Path) -> Iterator[str]:
    """A module's source, in whatever encoding it declares."""
    with tokenize.open(file) as stream:
        yield stream.read()


def read_docstrings(file: Path) -> Iterator[str]:
    """A module's docstrings as one document, or the topics of the language reference, a document each."""
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
    """(title, docstring) of a module, class or function and of all inside it, in the order of the source."""
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
    """The docstrings of the modules that are written in C and built into the interpreter, a document each."""
    for module_name in sorted(sys.builtin_module_names):
        module = importlib.import_module(module_name)
        seen: dict[str, str] = {}
        for name, value in sorted(vars(module).items()):
            if name.endswith("hook"):  # sys.excepthook and its like, which programs replace
                continue
            members = sorted(vars(value).items()) if isinstance(value, type) else ()
            for title, member in [(name, value), *((f"{name}.{inner}", v) for inner, v in members)]:
                docstring = getattr(member, "__doc__", None)
                if isinstance(docstring, str) and callable(value) and not name.startswith("__"):
                    seen.setdefault(docstring.strip(), title)
        entries = [f"{module_name}.{title}\n\n{docstring}" for docstring, title in seen.items() if docstring]
        yield "\n\n".join(entries) + "\n" if entries else ""


# --- training and validation ---


class Split:
    """A corpus in two: `train()` and `validation()` are iterators of documents.

    Validation is a tenth of the text, at most `validation_bytes`: whole documents, drawn by their hash, where there are
    enough of them; else the end of the text, to the character. The documents are read again for each pass.
    """

    def __init__(self, documents: Callable[[], Iterable[str]], validation_bytes: int):
        self._documents = documents
        sizes, keys, characters = [], [], []
        for document in documents():
            encoded = document.encode("utf-8")
            sizes.append(len(encoded))
            characters.append(len(document))
            keys.append(hashlib.blake2b(encoded, digest_size=8).digest())
        total = sum(sizes)
        target = min(total / 10, validation_bytes)

        self._chosen: set[int] = set()
        if len(sizes) >= ENOUGH_DOCUMENTS:
            taken = 0
            for i in sorted(range(len(sizes)), key=lambda i: (keys[i], i)):
                if taken + sizes[i] <= target:
                    self._chosen.add(i)
                    taken += sizes[i]
            if taken < target / 2:
                self._chosen.clear()
        # The end of the text: the document in which training stops, and at which character.
        self._cut = max(_tenth_from_end(characters), self._bytes_from_end(sizes, validation_bytes))

    def _bytes_from_end(self, sizes: list[int], limit: int) -> tuple[int, int]:
        """(document, character) from which on the text has at most `limit` bytes."""
        i = len(sizes)
        while i and sizes[i - 1] <= limit:
            i -= 1
            limit -= sizes[i]
        if i == 0:
            return 0, 0
        text = next(itertools.islice(self._documents(), i - 1, None))
        tail = text.encode("utf-8")[sizes[i - 1] - limit :].decode("utf-8", "ignore")  # not half a character
        return i - 1, len(text) - len(tail)

    def train(self) -> Iterator[str]:
        """The documents, or the beginning of the text, to learn from."""
        document, character = self._cut
        for i, text in enumerate(self._documents()):
            if self._chosen:
                if i not in self._chosen:
                    yield text
            elif i < document:
                yield text
            elif i == document and character:
                yield text[:character]

    def validation(self) -> Iterator[str]:
        """The documents, or the end of the text, that training never sees."""
        document, character = self._cut
        for i, text in enumerate(self._documents()):
            if self._chosen:
                if i in self._chosen:
                    yield text
            elif i > document:
                yield text
            elif i == document and character < len(text):
                yield text[character:]


def _tenth_from_end(characters: list[int]) -> tuple[int, int]:
    """(document, character) at which the last tenth of all characters begins."""
    remaining = sum(characters) * 9 // 10
    for i, length in enumerate(characters):
        if remaining < length:
            return i, remaining
        remaining -= length
    return len(characters), 0
