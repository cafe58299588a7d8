"""Pictures of attention: their size, colours and labels."""

import numpy as np

from gpt.training.callbacks.attention_maps import ABOVE, BESIDE, CELL, COLOURS, GAP, attention_picture

T = 5
WEIGHTS = np.zeros((3, T, T), np.float32)
WEIGHTS[:, :, 0] = 1.0
WEIGHTS[1] = np.eye(T)
WEIGHTS[2, 3] = [0.25, 0.25, 0.25, 0.25, 0.0]


def drawn(tokens: list[str]) -> np.ndarray:
    """The picture: (height, width, 3)."""
    return np.asarray(attention_picture(WEIGHTS, tokens))


def cell(picture: np.ndarray, head: int, row: int, column: int) -> list[int]:
    """The colour in the middle of a weight's cell; two heads stand side by side."""
    top = head // 2 * (ABOVE + T * CELL + GAP) + ABOVE + row * CELL + CELL // 2
    left = head % 2 * (BESIDE + T * CELL + GAP) + BESIDE + column * CELL + CELL // 2
    return picture[top, left].tolist()


def test_colours():
    """All of the attention is yellow, none violet, a quarter (half by its root) between, and blocked cells white."""
    picture = drawn(["a", "b", "c", "d", "e"])
    dark, middle, light = (COLOURS[i].astype(int).tolist() for i in (0, 2, 4))
    assert picture.dtype == np.uint8 and picture.shape[2] == 3
    assert cell(picture, 0, 4, 0) == light and cell(picture, 0, 4, 1) == dark
    assert cell(picture, 1, 3, 3) == light and cell(picture, 1, 3, 2) == dark
    assert cell(picture, 2, 3, 1) == middle
    assert cell(picture, 0, 1, 2) == [255, 255, 255]


def test_labels():
    """Each token labels its row and its column: another token changes the picture there, and not elsewhere."""
    picture = drawn(["a", "b", "c", "d", "e"])
    changed = np.argwhere((picture != drawn(["a", "b", "MW", "d", "e"])).any(axis=2))
    first = changed[(changed[:, 0] < ABOVE + T * CELL) & (changed[:, 1] < BESIDE + T * CELL)]
    row = first[first[:, 1] < BESIDE]
    column = first[first[:, 0] < ABOVE]
    assert len(row) and set((row[:, 0] - ABOVE) // CELL) == {2}
    assert len(column) and set((column[:, 1] - BESIDE) // CELL) == {2}
    assert len(row) + len(column) == len(first)


def test_letters_that_the_font_lacks():
    """They are escaped, where the font would draw the same box for each."""
    assert (drawn(["é", "b", "c", "d", "e"]) != drawn(["ß", "b", "c", "d", "e"])).any()
    assert (drawn(["⏎", "b", "c", "d", "e"]) == drawn(["\\n", "b", "c", "d", "e"])).all()
