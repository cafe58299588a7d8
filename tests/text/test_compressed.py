"""The compressor's mark: the very figure of `xz -9e`, in blocks of any size, and none where it would mislead."""

import lzma
import random
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from gpt.text.compressed import LEAST_BYTES, MOST_BYTES, xz_bits_per_byte

WORDS = [b"alpha ", b"beta ", b"gamma\n", "naïve ".encode(), b"zeta, "]
TEXT = b"".join(random.Random(7).choices(WORDS, k=20_011))


@pytest.mark.parametrize("size", [1, 7919, 65_537, len(TEXT)])
def test_blocks_do_not_matter(size):
    """The figure is that of the whole text compressed at once."""
    method = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": len(TEXT)}
    whole = lzma.compress(TEXT, filters=[method])
    blocks = (TEXT[start : start + size] for start in range(0, len(TEXT), size))
    assert xz_bits_per_byte(blocks, len(TEXT)) == 8 * len(whole) / len(TEXT)


def test_it_is_that_of_xz():
    """Within the few bytes that a header and a checksum take."""
    if not shutil.which("xz"):
        pytest.skip("this machine has no xz")
    packed = subprocess.run(["xz", "-9e", "--stdout"], input=TEXT, capture_output=True, check=True).stdout
    assert xz_bits_per_byte([TEXT], len(TEXT)) == pytest.approx(8 * len(packed) / len(TEXT), abs=8 * 64 / len(TEXT))


@pytest.mark.parametrize("size", [0, 1, LEAST_BYTES - 1, MOST_BYTES + 1, 10**9])
def test_no_figure_for_short_and_long_texts(size):
    """A short text flatters any model, a long one takes minutes: nothing is even read."""

    def blocks() -> Iterator[bytes]:
        raise AssertionError("the text was read")
        yield b""

    assert xz_bits_per_byte(blocks(), size) is None


def test_shortest_text():
    """10,000 bytes are enough."""
    assert xz_bits_per_byte([b"a" * 9_999, b"a"], 10_000) == pytest.approx(0.1, abs=0.1)
