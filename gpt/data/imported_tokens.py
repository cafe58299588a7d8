"""data=tokens: a prepared text, or token files of other programs, as a source of tokens."""

import glob
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpt.console import progress_bar
from gpt.data.data_config import DataConfig, is_url
from gpt.data.download import RemoteFile, fetch_if_remote, require_disk_space
from gpt.data.find_files import find_remote_files
from gpt.data.token_dataset import (
    DECODED_TOKENS,
    TOKENIZER_FILE,
    TokenSource,
    is_prepared,
    open_source,
    require_in_vocabulary,
    token_file_errors,
)
from gpt.data.token_files import (
    INDEX_SUFFIXES,
    TOKEN_SUFFIXES,
    TokenSequence,
    hash_tokens,
    is_validation_name,
    open_token_file,
    raise_open_file_limit,
)
from gpt.data.tokenizer import Tokenizer, TokenizerConfig, builtin_tokenizer, tokenizer_key
from gpt.errors import UserError, summarize_error
from gpt.files import expand_path, user_errors

TOKEN_FILES_FORMAT = 1  # raise it when the same files give other tokens, or another split
MAX_VALIDATION_TOKENS = 1_000_000  # of the training files, if no file is for validation; a tenth at most
END_OF_TEXT_SEARCH_TOKENS = 1_000_000  # an end-of-text is expected within these

AnyFile = Path | RemoteFile


class TokenFile(NamedTuple):
    """A token file, and the files that describe it, by their suffixes in `INDEX_SUFFIXES`."""

    name: str  # its path below the folder that holds all files
    file: AnyFile
    indices: dict[str, AnyFile]

    @property
    def is_validation(self) -> bool:
        return is_validation_name(self.name)


def open_tokens(
    data: DataConfig, tokenizer: TokenizerConfig | Tokenizer, cache: Path, print_line: Callable[[str], None]
) -> TokenSource:
    """Open what `data.path` names: a directory that `prepare` made, or token files of other programs.

    Other programs write no checksums. Their files are read once, to identify them and to check that their ids are in
    the vocabulary.

    Args:
        data: The paths.
        tokenizer: The tokenizer of the files, or which one it is.
        cache: The folder for copies of remote files and for hashes.
        print_line: Prints a line.
    """
    directory = expand_path(data.paths[0]).absolute()
    if len(data.paths) == 1 and is_prepared(directory):
        if data.validation_path:
            problem = f"data.path={data.paths[0]!r} has validation text of its own"
            raise UserError(f"{problem}: leave data.validation_path out")
        model_tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else None
        return open_source(directory, cache, tokenizer=model_tokenizer)
    files = _find_token_files(data.paths, cache, data.cache_bytes, print_line)
    validation = _find_token_files(data.validation_paths, cache, data.cache_bytes, print_line)
    validation = validation or [file for file in files if file.is_validation]
    validation_names = {str(file.file) for file in validation}
    train = [file for file in files if str(file.file) not in validation_names and not file.is_validation]
    if not train:
        raise UserError(f"data.path={data.path!r} names token files for validation only: name those for training, too")
    tokenizer, tokenizer_record = _tokenizer_of_files(train, tokenizer)
    opened = _open_files([*train, *validation], tokenizer, data, cache)
    identities = "".join(identity for _, identity in opened.values())
    key = {
        "token_files": TOKEN_FILES_FORMAT,
        "corpus": hashlib.sha256(identities.encode()).hexdigest(),
        "validation_files": len(validation),
        "tokenizer": tokenizer_record,
        "validation_bytes": data.validation_bytes,
    }
    arrays = {name: ids for name, (ids, _) in opened.items()}
    train_tokens, validation_tokens = _split(train, validation, arrays, tokenizer.end_of_text, data, print_line)
    return _make_source(train_tokens, validation_tokens, tokenizer, key, print_line)


def _find_token_files(
    paths: Iterable[str], cache: Path, cache_bytes: int, print_line: Callable[[str], None]
) -> list[TokenFile]:
    """Return the token files that each path names, sorted: one, all below a folder, or the matches of a glob."""
    token_files = []
    for path in paths:
        files = _find_remote(path, cache, cache_bytes, print_line) if is_url(path) else _find_local(path)
        files = [file for file in files if file.name.endswith(TOKEN_SUFFIXES) and "/." not in f"/{file.name}"]
        if not files:
            suffixes = " or ".join(TOKEN_SUFFIXES)
            problem = f"data.path={path!r} names no file whose name ends in {suffixes}"
            raise UserError(f"{problem}: give a token file, a folder or a glob")
        token_files += files
    return token_files


def _find_local(path: str) -> list[TokenFile]:
    root = expand_path(path)
    if root.is_dir():
        top = root
        files = sorted(root.rglob("*"))
    elif root.is_file():
        top = root.parent
        files = [root]
    else:
        top = next(folder for folder in root.parents if not glob.has_magic(str(folder)))
        files = sorted(top.glob(str(root.relative_to(top))))
    token_files = []
    for file in filter(Path.is_file, files):
        candidates = {suffix: file.with_name(_index_name(file.name, suffix)) for suffix in INDEX_SUFFIXES}
        indices: dict[str, AnyFile] = {suffix: index for suffix, index in candidates.items() if index.is_file()}
        token_files.append(TokenFile(file.relative_to(top).as_posix(), file, indices))
    return token_files


def _find_remote(url: str, cache: Path, cache_bytes: int, print_line: Callable[[str], None]) -> list[TokenFile]:
    files = find_remote_files(url, cache, cache_bytes, print_line)
    by_url = {file.url: file for file in files}
    if not url.startswith("http"):  # a web server does not list folders
        for folder in {file.url.rpartition("/")[0] for file in files}:
            by_url |= {file.url: file for file in find_remote_files(folder, cache, cache_bytes, print_line)}
    top = os.path.commonprefix([file.url for file in files]).rpartition("/")[0]  # noqa: RUF071 - of URLs, not paths
    token_files = []
    for file in files:
        candidates = {suffix: by_url.get(_index_name(file.url, suffix)) for suffix in INDEX_SUFFIXES}
        indices: dict[str, AnyFile] = {suffix: index for suffix, index in candidates.items() if index}
        token_files.append(TokenFile(file.url.removeprefix(top).lstrip("/"), file, indices))
    return token_files


def _index_name(name: str, suffix: str) -> str:
    return name.removesuffix(".bin") + suffix if suffix == ".idx" else name + suffix


def _tokenizer_of_files(
    files: Sequence[TokenFile], tokenizer: TokenizerConfig | Tokenizer
) -> tuple[Tokenizer, dict[str, str]]:
    """Return the tokenizer that made token files, and what determines it. No format of other programs stores it."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer, tokenizer_key(tokenizer)
    if tokenizer.name != "bpe":
        return builtin_tokenizer(tokenizer.name), tokenizer_key(tokenizer)
    path = files[0].file.parent / TOKENIZER_FILE if isinstance(files[0].file, Path) else None
    if path is None or not path.is_file():
        hint = f"set tokenizer=gpt2 or byte, or put the {TOKENIZER_FILE} of a prepared text beside local files"
        raise UserError(
            f"{files[0].file}: a token file does not name its tokenizer, and tokenizer=bpe trains one: {hint}"
        )
    with user_errors(path):
        try:
            stored = Tokenizer.from_dict(json.loads(path.read_bytes()))
        except ValueError as error:
            hint = "copy the one of a prepared text, not a tokenizer.json of the Hugging Face libraries"
            raise UserError(f"{path}: is not a tokenizer of this project ({summarize_error(error)}): {hint}") from None
    return stored, tokenizer_key(stored)


def _open_files(
    files: Sequence[TokenFile], tokenizer: Tokenizer, data: DataConfig, cache: Path
) -> dict[str, tuple[np.ndarray, str]]:
    """Fetch, map and check token files. Return the ids and the identity of each, by its path or URL."""
    fetched = [file.file for file in files] + [index for file in files for index in file.indices.values()]
    require_disk_space(fetched, cache, data.cache_bytes)
    raise_open_file_limit(len(files))
    opened = {}
    for file in files:
        path = fetch_if_remote(file.file)
        with token_file_errors(file.file, "fetch or write it again"):
            indices = {suffix: fetch_if_remote(index) for suffix, index in file.indices.items()}
            ids = open_token_file(path, file.name, indices, tokenizer.vocab_size)
            with progress_bar(f"checking {file.name}", path.stat().st_size, delay=1) as bar:
                sha256, highest = hash_tokens(path, ids, cache, bar.update)
            require_in_vocabulary(highest, tokenizer.vocab_size)
        opened[str(file.file)] = ids, f"{file.name}\n{path.stat().st_size}\n{sha256}\n"
    return opened


def _split(
    train: Sequence[TokenFile],
    validation: Sequence[TokenFile],
    arrays: dict[str, np.ndarray],
    end_of_text: int,
    data: DataConfig,
    print_line: Callable[[str], None],
) -> tuple[TokenSequence, TokenSequence]:
    """Return the tokens for training and for validation.

    Validation takes the first tokens of the validation files. Without such files it takes the last training tokens,
    from an end-of-text on if one is near.
    """
    tokens = TokenSequence([arrays[str(file.file)] for file in train])
    if validation:
        validation_tokens = TokenSequence([arrays[str(file.file)] for file in validation])
        limit = data.validation_bytes
        if len(validation_tokens) > limit:
            selection = f"the first {limit:,} of {len(validation_tokens):,} tokens of {validation[0].name}"
            print_line(f"validating on {selection}: data.validation_bytes= sets how many")
        return tokens, validation_tokens.part(0, limit)
    start = len(tokens) - min(data.validation_bytes, MAX_VALIDATION_TOKENS, len(tokens) // 10)
    boundaries = np.flatnonzero(tokens[start : (start + len(tokens)) // 2] == end_of_text)
    if len(boundaries):
        start += int(boundaries[0])
    why = "no file is named val, valid, validation or dev"
    print_line(f"validating on the last {len(tokens) - start:,} tokens: {why}; data.validation_path= names others")
    return tokens.part(0, start), tokens.part(start, len(tokens))


def _make_source(
    train: TokenSequence, validation: TokenSequence, tokenizer: Tokenizer, key: dict, print_line: Callable[[str], None]
) -> TokenSource:
    """Return a source with counts, which other programs do not store. The counts of training text are estimates."""
    if not (train[:END_OF_TEXT_SEARCH_TOKENS] == tokenizer.end_of_text).any():
        count = min(len(train), END_OF_TEXT_SEARCH_TOKENS)
        finding = f"no end-of-text (id {tokenizer.end_of_text:,}) in the first {count:,} tokens"
        print_line(f"{finding}: the model will not learn where a document begins")
    ids = validation[:]
    token_bytes = np.zeros(tokenizer.vocab_size, np.int64)
    for token, rank in tokenizer.ranks.items():
        token_bytes[rank] = len(token)
    size = sum(int(token_bytes[ids[i : i + DECODED_TOKENS]].sum()) for i in range(0, len(ids), DECODED_TOKENS))
    documents = int((ids == tokenizer.end_of_text).sum())
    ratio = len(train) / max(1, len(ids))
    splits = {
        "train": {"tokens": len(train), "bytes": round(size * ratio), "documents": round(documents * ratio)},
        "validation": {"tokens": len(ids), "bytes": size, "documents": documents},
    }
    return TokenSource(train, ids, tokenizer, {"key": key, "corpus": "tokens", "splits": splits})
