"""What a strong general-purpose compressor makes of a text: a mark for a model to beat."""

import lzma
from collections.abc import Iterable

LEAST_BYTES = 10_000  # below, the compressor has too little to learn from, which flatters any model
MOST_BYTES = 10_000_000  # above, it takes minutes


def xz_bits_per_byte(blocks: Iterable[bytes], size: int) -> float | None:
    """Return the bits per byte of `xz -9e` for a text of `size` bytes; None if it is too short or too long."""
    if not LEAST_BYTES <= size <= MOST_BYTES:
        return None
    # As xz itself does: a dictionary no larger than the text, which saves 700 MB of memory.
    method = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": size}
    compressor = lzma.LZMACompressor(filters=[method])
    compressed = sum(len(compressor.compress(block)) for block in blocks) + len(compressor.flush())
    return 8 * compressed / size
