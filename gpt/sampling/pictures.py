"""The attention of all heads of a model, as one picture."""

import numpy as np

CELL, GAP = 4, 8  # pixels: of a weight, and after each head
# From nothing to all of the attention, dark to light, which also reads in grey (five points of viridis).
COLOURS = np.array([[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], dtype=float)


def attention_picture(maps: np.ndarray, cell: int = CELL) -> np.ndarray:
    """Draw attention weights (layers, heads, T, T) as a picture (height, width, 3): a row of heads for each layer.

    Within a head, each row is a token that attends. Colours go by the square root of the weights, so that small ones
    show. A weight is `cell` pixels wide.
    """
    layers, heads, T, _ = maps.shape
    shades = np.sqrt(np.clip(maps, 0.0, 1.0)) * (len(COLOURS) - 1)
    colours = np.stack([np.interp(shades, np.arange(len(COLOURS)), channel) for channel in COLOURS.T], axis=-1)
    side = T * cell + GAP
    picture = np.full((layers, heads, side, side, 3), 255, np.uint8)
    seen = np.where(np.tri(T, dtype=bool)[..., None], colours.round(), 255)
    picture[:, :, : T * cell, : T * cell] = seen.repeat(cell, axis=2).repeat(cell, axis=3)
    return picture.transpose(0, 2, 1, 3, 4).reshape(layers * side, heads * side, 3)
