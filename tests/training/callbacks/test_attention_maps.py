"""The picture of attention: where each weight stands, and its colour."""

import numpy as np

from gpt.sampling.pictures import CELL, COLOURS, GAP, attention_picture

T = 5
MAPS = np.zeros((2, 3, T, T), np.float32)
MAPS[..., 0] = 1.0
MAPS[1, 1] = np.eye(T)
MAPS[1, 2, 3] = [0.25, 0.25, 0.25, 0.25, 0.0]


def test_picture():
    """All of the attention is yellow, none violet, a quarter (half by its root) between; masked weights are white."""
    picture = attention_picture(MAPS)
    side = T * CELL + GAP
    assert picture.dtype == np.uint8 and picture.shape == (2 * side, 3 * side, 3)

    def colour(layer: int, head: int, row: int, column: int) -> list[int]:
        top, left = layer * side + row * CELL, head * side + column * CELL
        block = picture[top : top + CELL, left : left + CELL].reshape(-1, 3)
        assert (block == block[0]).all()
        return block[0].tolist()

    dark, middle, light = (COLOURS[i].tolist() for i in (0, 2, 4))
    assert colour(0, 2, 4, 0) == light and colour(0, 2, 4, 1) == dark
    assert colour(1, 1, 3, 3) == light and colour(1, 1, 3, 2) == dark
    assert colour(1, 2, 3, 1) == middle
    assert colour(0, 0, 1, 2) == [255, 255, 255]
    assert (picture[T * CELL : side] == 255).all() and (picture[:, T * CELL : side] == 255).all()
