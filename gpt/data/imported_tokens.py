"""data=tokens: a prepared text, or token files of other programs, as a source of tokens."""

import glob
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpt.console import progress_bar
from gpt.data.data_config import DataConfig, is_url
from gpt.data.download import RemoteFile, fetch_if_remote, require_disk_space
from gpt.data.find_files import find_remote_files
from gpt.data.storage import Directory, as_directory, file_size
from gpt.data.token_dataset import (
    DATASET_FILE,
    DECODED_TOKENS,
    MANIFEST_FILE,
    TOKENIZER_FILE,
    TokenSource,
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
from gpt.data.tokenizer import Tokenizer, TokenizerConfig, byte_tokenizer, gpt2_tokenizer, tokenizer_key
from gpt.errors import UserError, reason
from gpt.files import explain, home_path

TOKEN_FILES_FORMAT = 1  # raise it when the same files give other tokens, or another split
VALIDATION_TOKENS = 1_000_000  # of training files without validation text beside them, at most a tenth
END_OF_TEXT_SEARCH_TOKENS = 1_000_000  # in which an end-of-text is expected


class TokenFile(NamedTuple):
    """A token file, and the files that describe it, by their suffixes in `INDEX_SUFFIXES`."""

    name: str  # from the folder on that holds all files
    file: Path | RemoteFile
    indices: dict[str, Path | RemoteFile]

    @property
    def is_validation(self) -> bool:
        return is_validation_name(self.name)


def open_tokens(
    data: DataConfig, tokenizer: TokenizerConfig | Tokenizer, cache: Path, say: Callable[[str], None]
) -> TokenSource:
    """Open what `data.path` names: a directory that `prepare` made, or token files of other programs.

    These have no checksums, so they are believed. They are read once to check that their ids are in the vocabulary,
    and to identify them. Raises `UserError` naming what is wrong and what to do about it.
    """
    directory = as_directory(data.paths[0])
    if len(data.paths) == 1 and _is_prepared(directory):
        if data.validation_path:
            what = f"data.path={data.paths[0]!r} has validation text of its own"
            raise UserError(f"{what}: leave data.validation_path out")
        model_tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else None
        return open_source(directory, cache, data.cache_bytes, tokenizer=model_tokenizer)
    files = [file for path in data.paths for file in find_token_files(path, cache, data.cache_bytes, say)]
    chosen = [file for path in data.validation_paths for file in find_token_files(path, cache, data.cache_bytes, say)]
    validation = chosen or [file for file in files if file.is_validation]
    held_out = {str(file.file) for file in validation}
    train = [file for file in files if str(file.file) not in held_out and not file.is_validation]
    if not train:
        raise UserError(f"data.path={data.path!r} names token files for validation only: name those for training, too")
    tokenizer, tokenizer_record = _tokenizer_of_files(train, tokenizer)
    opened = _open_files([*train, *validation], tokenizer, data, cache)
    arrays = {name: ids for name, (ids, _) in opened.items()}
    key = {
        "token_files": TOKEN_FILES_FORMAT,
        "corpus": hashlib.sha256("".join(identity for _, identity in opened.values()).encode()).hexdigest(),
        "validation_files": len(validation),
        "tokenizer": tokenizer_record,
        "validation_bytes": data.validation_bytes,
    }
    parts = _split(train, validation, arrays, tokenizer.end_of_text, data.validation_bytes, say)
    return _make_source(*parts, tokenizer, key, say)


def _is_prepared(directory: Directory) -> bool:
    is_file = isinstance(directory, str) and (directory.endswith(TOKEN_SUFFIXES) or glob.has_magic(directory))
    is_folder = directory.is_dir() if isinstance(directory, Path) else not is_file
    return is_folder and any(file_size(directory, name) is not None for name in (DATASET_FILE, MANIFEST_FILE))


def find_token_files(path: str, cache: Path, cache_bytes: int, say: Callable[[str], None]) -> list[TokenFile]:
    """Return, sorted, the token files that a path or a URL names: one, all below a folder, or the matches of a glob."""
    found = _find_remote(path, cache, cache_bytes, say) if is_url(path) else _find_local(path)
    files = [file for file in found if file.name.endswith(TOKEN_SUFFIXES) and "/." not in f"/{file.name}"]
    if not files:
        suffixes = " or ".join(TOKEN_SUFFIXES)
        raise UserError(
            f"data.path={path!r} names no token file, which ends in {suffixes}: give a file, folder or glob"
        )
    return files


def _find_local(path: str) -> list[TokenFile]:
    root = home_path(path)
    if root.is_dir():
        top, files = root, sorted(root.rglob("*"))
    elif root.is_file():
        top, files = root.parent, [root]
    else:
        top = next(folder for folder in root.parents if not glob.has_magic(str(folder)))
        files = sorted(top.glob(str(root.relative_to(top))))
    found = []
    for file in filter(Path.is_file, files):
        beside = {suffix: file.with_name(_index_name(file.name, suffix)) for suffix in INDEX_SUFFIXES}
        indices: dict[str, Path | RemoteFile] = {suffix: index for suffix, index in beside.items() if index.is_file()}
        found.append(TokenFile(file.relative_to(top).as_posix(), file, indices))
    return found


def _find_remote(url: str, cache: Path, cache_bytes: int, say: Callable[[str], None]) -> list[TokenFile]:
    files = find_remote_files(url, cache, cache_bytes, say)
    known = {file.url: file for file in files}
    if not url.startswith("http"):  # a web server lists nothing
        for folder in {file.url.rpartition("/")[0] for file in files}:
            known |= {file.url: file for file in find_remote_files(folder, cache, cache_bytes, say)}
    top = os.path.commonprefix([file.url for file in files]).rpartition("/")[0]  # noqa: RUF071 - of URLs, not paths
    found = []
    for file in files:
        beside = {suffix: known.get(_index_name(file.url, suffix)) for suffix in INDEX_SUFFIXES}
        indices: dict[str, Path | RemoteFile] = {suffix: index for suffix, index in beside.items() if index}
        found.append(TokenFile(file.url.removeprefix(top).lstrip("/"), file, indices))
    return found


def _index_name(name: str, suffix: str) -> str:
    return name.removesuffix(".bin") + suffix if suffix == ".idx" else name + suffix


def _tokenizer_of_files(
    files: Sequence[TokenFile], tokenizer: TokenizerConfig | Tokenizer
) -> tuple[Tokenizer, dict[str, str]]:
    """Return the tokenizer that made token files, and what determines it. No format holds one."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer, tokenizer_key(tokenizer)
    if tokenizer.name != "bpe":
        return (gpt2_tokenizer() if tokenizer.name == "gpt2" else byte_tokenizer()), tokenizer_key(tokenizer)
    stored = files[0].file.parent / TOKENIZER_FILE if isinstance(files[0].file, Path) else None
    if stored is None or not stored.is_file():
        hint = f"set tokenizer=gpt2 or byte, or put the {TOKENIZER_FILE} of a prepared text beside local files"
        raise UserError(
            f"{files[0].file}: a token file does not name its tokenizer, and tokenizer=bpe trains one: {hint}"
        )
    with explain(stored):
        try:
            own = Tokenizer.from_dict(json.loads(stored.read_bytes()))
        except ValueError as error:
            hint = "copy the one of a prepared text, not that of the Hugging Face libraries"
            raise UserError(f"{stored}: is not a tokenizer of this project ({reason(error)}): {hint}") from None
    return own, tokenizer_key(own)


def _open_files(
    files: Sequence[TokenFile], tokenizer: Tokenizer, data: DataConfig, cache: Path
) -> dict[str, tuple[np.ndarray, str]]:
    """Fetch token files, map and check them; return the ids and the identity of each, by its path or URL."""
    require_disk_space([one for file in files for one in (file.file, *file.indices.values())], cache, data.cache_bytes)
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
    max_tokens: int,
    say: Callable[[str], None],
) -> tuple[TokenSequence, TokenSequence]:
    """Return the tokens for training and those for validation: the first of the given files, or the last of all."""
    tokens = TokenSequence([arrays[str(file.file)] for file in train])
    if validation:
        held_out = TokenSequence([arrays[str(file.file)] for file in validation])
        if len(held_out) > max_tokens:
            what = f"validating on the first {max_tokens:,} of {len(held_out):,} tokens of {validation[0].name}"
            say(f"{what}: data.validation_bytes= sets how many")
        return tokens, held_out.part(0, max_tokens)
    start = len(tokens) - min(max_tokens, VALIDATION_TOKENS, len(tokens) // 10)
    ends = np.flatnonzero(tokens[start : (start + len(tokens)) // 2] == end_of_text)
    start += int(ends[0]) if len(ends) else 0
    what = f"validating on the last {len(tokens) - start:,} tokens: no file is named val, valid, validation or dev"
    say(f"{what}; data.validation_path= names others")
    return tokens.part(0, start), tokens.part(start, len(tokens))


def _make_source(
    train: TokenSequence, validation: TokenSequence, tokenizer: Tokenizer, key: dict, say: Callable[[str], None]
) -> TokenSource:
    """Return a source with the counts that other programs do not keep; those of the training text are estimated."""
    if not (train[:END_OF_TEXT_SEARCH_TOKENS] == tokenizer.end_of_text).any():
        what = f"no end-of-text (id {tokenizer.end_of_text:,}) in the first {min(len(train), END_OF_TEXT_SEARCH_TOKENS):,} tokens"
        say(f"{what}: the model will not learn where a document begins")
    ids, lengths = validation[:], np.zeros(tokenizer.vocab_size, np.int64)
    for token, rank in tokenizer.ranks.items():
        lengths[rank] = len(token)
    size = sum(int(lengths[ids[i : i + DECODED_TOKENS]].sum()) for i in range(0, len(ids), DECODED_TOKENS))
    documents = int((ids == tokenizer.end_of_text).sum())
    ratio = len(train) / max(1, len(ids))
    splits = {
        "train": {"tokens": len(train), "bytes": round(size * ratio), "documents": round(documents * ratio)},
        "validation": {"tokens": len(ids), "bytes": size, "documents": documents},
    }
    return TokenSource(train, ids, tokenizer, {"key": key, "corpus": "tokens", "splits": splits})
