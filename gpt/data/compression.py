"""From files to bytes: decompressed by the suffix, in blocks, with one-line errors."""

import bz2
import codecs
import contextlib
import gzip
import lzma
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import IO, Any

from gpt.errors import UserError
from gpt.files import user_errors

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ),
    # The largest window, as of zstd --long=31. Memory grows only as a frame needs it.
    ".zst": lambda: zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: 31}),
}
COMPRESSED_SUFFIXES = (".gz", *_DECOMPRESSORS)
LEADING_BYTES = codecs.BOM_UTF8 + b" \t\r\n"  # may precede the first character of a text


def read_beginning(file: Path, encoding: str = "utf-8") -> bytes:
    """Return the first bytes of a file's content in UTF-8, from its first character on, and leave the file closed."""
    with contextlib.closing(decompress(file, 4096)) as blocks:
        first = next(blocks, b"")[:4096]
    if encoding != "utf-8":
        first = first.decode(encoding, "ignore").encode(errors="ignore")
    return first.lstrip(LEADING_BYTES)


def decompress(file: Path, size: int, start: int = 0) -> Generator[bytes, None, None]:
    """Yield a file's content in blocks of at least `size` bytes; the last may be shorter. The suffix decides how.

    `start` is the byte to begin at, of a file that is not compressed.
    """
    buffer: list[bytes] = []
    length = offset = 0
    with user_errors(file):
        try:
            with contextlib.closing(_raw_blocks(file, size, start)) as blocks:
                for block in blocks:
                    buffer.append(block)
                    length += len(block)
                    offset += len(block)
                    if length >= size:
                        yield b"".join(buffer)
                        buffer, length = [], 0
        except Exception as error:  # each library has its own error for damage; bz2 raises OSError without a number
            if isinstance(error, MemoryError) or getattr(error, "errno", None) is not None:
                raise
            raise UserError(
                f"{file}: cannot be decompressed beyond byte {offset:,} of its content ({error}): "
                "the file is damaged, truncated, or of another format; fetch it again"
            ) from None
        if length:
            yield b"".join(buffer)


def _raw_blocks(file: Path, size: int, start: int) -> Generator[bytes, None, None]:
    """Yield a file's content in blocks of any size."""
    suffix = file.suffix.lower()
    opener: Any = gzip.open if suffix == ".gz" else Path.open
    with opener(file, "rb") as stream:
        if start:
            stream.seek(start)
        if suffix in _DECOMPRESSORS:
            yield from _decompress_members(stream, _DECOMPRESSORS[suffix])
        else:
            yield from iter(lambda: stream.read(size), b"")


def _decompress_members(stream: IO[bytes], new_decompressor: Callable[[], Any]) -> Iterator[bytes]:
    """Decompress member by member. `bz2.open` and `lzma.open` would take a damaged second member for the end."""
    member = None
    while compressed := stream.read(1 << 8):  # so little because zstd may make 8 MB of it at once
        while compressed:
            if member is None or member.eof:
                member = new_decompressor()
            yield member.decompress(compressed)
            compressed = member.unused_data
    if member is not None and not member.eof:
        raise EOFError("the compressed data ends early")
