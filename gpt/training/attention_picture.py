"""A picture of a layer's attention: a map for each head, with its tokens along both sides and a bar for the colours."""

import functools
import math
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

CELL, BESIDE, ABOVE, GAP = 12, 64, 58, 10  # pixels: of a weight, for labels, between heads
LETTERS = 10  # of a label
FONT_SIZE = 10
# From nothing to all of the attention, dark to light, which also reads in grey (five points of viridis).
COLOURS = np.array([[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], dtype=float)


def attention_picture(weights: np.ndarray, tokens: list[str]) -> np.ndarray:
    """Draw attention weights (H, T, T): a row for each token that looks. Returns an image (height, width, 3) of bytes.

    Colours go by the square root of the weights, so that small ones show.
    """
    heads, T, _ = weights.shape
    columns = math.ceil(math.sqrt(heads))
    rows = math.ceil(heads / columns)
    side = T * CELL
    width, height = columns * (BESIDE + side + GAP) + 60, rows * (ABOVE + side + GAP)
    picture = Image.new("RGB", (width, height), "white")
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(FONT_SIZE)
    frame = _frame(tuple(tokens))
    blocked = np.kron(np.triu(np.ones((T, T), bool), 1), np.ones((CELL, CELL), bool))
    for head, matrix in enumerate(weights):
        left, top = head % columns * (BESIDE + side + GAP), head // columns * (ABOVE + side + GAP)
        picture.paste(frame, (left, top))
        draw.text((left + BESIDE, top + 2), f"head {head + 1}", "black", font)
        colours = _colour(matrix).repeat(CELL, 0).repeat(CELL, 1)
        colours[blocked] = 255
        picture.paste(Image.fromarray(colours), (left + BESIDE, top + ABOVE))
    _draw_bar(picture, draw, font, min(side, height - ABOVE))
    return np.asarray(picture)


@functools.lru_cache(1)  # a run draws the same tokens again and again
def _frame(tokens: tuple[str, ...]) -> Image.Image:
    """The labels of one head's map: at the left, and turned upright above."""
    side, font = len(tokens) * CELL, ImageFont.load_default(FONT_SIZE)
    frame = Image.new("RGB", (BESIDE + side, ABOVE + side), "white")
    draw = ImageDraw.Draw(frame)
    above = Image.new("RGB", (ABOVE - 18, side), "white")
    for i, token in enumerate(tokens):
        draw.text((BESIDE - 6, ABOVE + (i + 0.5) * CELL), token[:LETTERS], "black", font, anchor="rm")
        ImageDraw.Draw(above).text((2, (i + 0.5) * CELL), token[: LETTERS - 2], "black", font, anchor="lm")
    frame.paste(above.rotate(90, expand=True), (BESIDE, 18))
    return frame


def _colour(weights: np.ndarray) -> np.ndarray:
    places = np.sqrt(np.clip(weights, 0.0, 1.0)) * (len(COLOURS) - 1)
    channels = [np.interp(places, np.arange(len(COLOURS)), COLOURS[:, channel]) for channel in range(3)]
    return np.stack(channels, axis=-1).round().astype(np.uint8)


def _draw_bar(picture: Image.Image, draw: ImageDraw.ImageDraw, font: Any, length: int) -> None:
    """Draw the colours with the weights that they stand for, at the right."""
    shades = _colour(np.linspace(1.0, 0.0, length) ** 2)[:, None].repeat(12, axis=1)
    left = picture.width - 50
    picture.paste(Image.fromarray(shades), (left, ABOVE))
    for weight in (0.0, 0.1, 0.25, 0.5, 1.0):
        draw.text(
            (left + 16, ABOVE + (1 - math.sqrt(weight)) * (length - 1)), f"{weight:g}", "black", font, anchor="lm"
        )
