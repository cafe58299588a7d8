"""The picture of attention: where each weight stands, its colour, and its words."""

import numpy as np

from gpt.sampling.pictures import BLUE, CELL, GAP, INK, LINE, attention_picture

T = 5
TOKENS = ["The", "·cat", "·sat", "⏎", "·extraordinarily"]
MAPS = np.zeros((2, 3, T, T), np.float32)
MAPS[..., 0] = 1.0
MAPS[1, 1] = np.eye(T)
MAPS[1, 2, 3] = [0.25, 0.25, 0.25, 0.25, 0.0]


def test_picture():
    """All of the attention is blue, none white, a quarter (half by its root) between; every token and head is named."""
    picture = np.asarray(attention_picture(MAPS, TOKENS, "five tokens"))
    side = T * CELL + GAP
    margin = picture.shape[1] - 3 * side
    top = 2 * LINE + margin
    assert picture.dtype == np.uint8 and picture.shape == (top + 2 * (side + LINE), margin + 3 * side, 3)

    def colour(layer: int, head: int, row: int, column: int) -> list[int]:
        y, x = top + layer * (side + LINE) + row * CELL, margin + head * side + column * CELL
        block = picture[y : y + CELL, x : x + CELL].reshape(-1, 3)
        assert (block == block[0]).all()
        return block[0].tolist()

    blue, white = BLUE.tolist(), [255, 255, 255]
    half = (255 + 0.5 * (BLUE - 255)).round().tolist()
    assert colour(0, 2, 4, 0) == blue and colour(0, 2, 4, 1) == white
    assert colour(1, 1, 3, 3) == blue and colour(1, 1, 3, 2) == white
    assert colour(1, 2, 3, 1) == half

    def has_words(ys: slice, xs: slice) -> bool:
        return bool((picture[ys, xs] == INK).all(-1).any())

    assert has_words(slice(0, LINE), slice(None))  # which text it is
    for layer in range(2):
        y = top + layer * (side + LINE)
        assert has_words(slice(y, y + T * CELL), slice(0, margin - 2))
        for head in range(3):
            x = margin + head * side
            assert has_words(slice(y - LINE, y - 1), slice(x, x + side))
            assert has_words(slice(LINE, LINE + margin), slice(x, x + T * CELL))
