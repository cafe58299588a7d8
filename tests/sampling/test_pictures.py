"""The picture of attention: the position and colour of each weight, and the labels."""

import numpy as np

from gpt.sampling.pictures import BLUE, CELL_PX, GAP_PX, INK, LINE_PX, draw_attention

T = 5
TOKENS = ["The", "·cat", "·sat", "⏎", "·extraordinarily"]
MAPS = np.zeros((2, 3, T, T), np.float32)
MAPS[..., 0] = 1.0
MAPS[1, 1] = np.eye(T)
MAPS[1, 2, 3] = [0.25, 0.25, 0.25, 0.25, 0.0]


def test_shades_and_labels():
    """A weight of one is blue, zero is white, and a quarter is half blue. Every token and head has a label."""
    picture = np.asarray(draw_attention(MAPS, TOKENS, "five tokens"))
    side = T * CELL_PX + GAP_PX
    margin = picture.shape[1] - 3 * side
    top = 2 * LINE_PX + margin
    assert picture.dtype == np.uint8 and picture.shape == (top + 2 * (side + LINE_PX), margin + 3 * side, 3)

    def colour(layer: int, head: int, row: int, column: int) -> list[int]:
        y, x = top + layer * (side + LINE_PX) + row * CELL_PX, margin + head * side + column * CELL_PX
        block = picture[y : y + CELL_PX, x : x + CELL_PX].reshape(-1, 3)
        assert (block == block[0]).all()
        return block[0].tolist()

    blue, white = BLUE.tolist(), [255, 255, 255]
    half = (255 + 0.5 * (BLUE - 255)).round().tolist()
    assert colour(0, 2, 4, 0) == blue and colour(0, 2, 4, 1) == white
    assert colour(1, 1, 3, 3) == blue and colour(1, 1, 3, 2) == white
    assert colour(1, 2, 3, 1) == half

    def has_words(ys: slice, xs: slice) -> bool:
        return bool((picture[ys, xs] == INK).all(-1).any())

    assert has_words(slice(0, LINE_PX), slice(None))  # the title
    for layer in range(2):
        y = top + layer * (side + LINE_PX)
        assert has_words(slice(y, y + T * CELL_PX), slice(0, margin - 2))
        for head in range(3):
            x = margin + head * side
            assert has_words(slice(y - LINE_PX, y - 1), slice(x, x + side))
            assert has_words(slice(LINE_PX, LINE_PX + margin), slice(x, x + T * CELL_PX))
