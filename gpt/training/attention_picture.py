"""A picture of a layer's attention: a map for each head, with its tokens along both sides and a bar for the colours."""

import functools
import io
import math

import numpy as np
from PIL import Image, ImageDraw, ImageFont

CELL, BESIDE, ABOVE, GAP = 12, 64, 58, 10  # pixels: of a weight, for labels, between heads
LETTERS = 10  # of a label
FONT_SIZE = 10
# From nothing to all of the attention, dark to light, which also reads in grey (five points of viridis).
COLOURS = np.array([[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], dtype=float)
SHADES, WHITE = 193, 255  # a pixel is one byte: first the shades of a weight, then greys for text, up to white


def attention_picture(weights: np.ndarray, tokens: list[str]) -> Image.Image:
    """Draw attention weights (H, T, T): a row for each token that looks.

    Colours go by the square root of the weights, so that small ones show.
    """
    heads, T, _ = weights.shape
    pixels = _frame(heads, tuple(tokens)).copy()
    cells = np.where(np.tri(T, dtype=bool), _shade(weights), WHITE).astype(np.uint8)
    for (top, left), head in zip(_places(heads, T), cells, strict=True):
        pixels[top : top + T * CELL, left : left + T * CELL] = head.repeat(CELL, 0).repeat(CELL, 1)
    picture = Image.fromarray(pixels)
    picture.putpalette(_palette())
    return picture


def to_png(picture: Image.Image) -> bytes:
    """The picture as a file. The quickest compression will do: its areas are plain."""
    file = io.BytesIO()
    picture.save(file, "PNG", compress_level=1)
    return file.getvalue()


def _places(heads: int, T: int) -> list[tuple[int, int]]:
    """The upper left corner of each head's map, without labels: its row and column of pixels."""
    columns, side = math.ceil(math.sqrt(heads)), T * CELL
    return [
        (head // columns * (ABOVE + side + GAP) + ABOVE, head % columns * (BESIDE + side + GAP) + BESIDE)
        for head in range(heads)
    ]


@functools.lru_cache(1)  # a run draws the same tokens again and again
def _frame(heads: int, tokens: tuple[str, ...]) -> np.ndarray:
    """All that stays the same: the labels at the left of each map and upright above it, and the bar at the right."""
    T, side = len(tokens), len(tokens) * CELL
    places = _places(heads, T)
    bottom, right = (max(place[axis] for place in places) + side + GAP for axis in (0, 1))
    picture = Image.new("L", (right + 60, bottom), 255)
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(FONT_SIZE)
    beside, above = Image.new("L", (BESIDE, side), 255), Image.new("L", (ABOVE - 18, side), 255)
    for i, token in enumerate(map(_escaped, tokens)):
        middle = (i + 0.5) * CELL
        ImageDraw.Draw(beside).text((BESIDE - 6, middle), token[:LETTERS], 0, font, anchor="rm")
        ImageDraw.Draw(above).text((2, middle), token[: LETTERS - 2], 0, font, anchor="lm")
    for head, (top, left) in enumerate(places, start=1):
        draw.text((left, top - ABOVE + 2), f"head {head}", 0, font)
        picture.paste(beside, (left - BESIDE, top))
        picture.paste(above.rotate(90, expand=True), (left, top - ABOVE + 18))
    length = min(side, bottom - ABOVE)
    for weight in (0.0, 0.1, 0.25, 0.5, 1.0):
        draw.text((right + 26, ABOVE + (1 - math.sqrt(weight)) * (length - 1)), f"{weight:g}", 0, font, anchor="lm")
    pixels = SHADES + np.round(np.asarray(picture) / 255 * (WHITE - SHADES)).astype(np.uint8)
    pixels[ABOVE : ABOVE + length, right + 10 : right + 22] = _shade(np.linspace(1.0, 0.0, length) ** 2)[:, None]
    return pixels


def _escaped(token: str) -> str:
    """The token in characters that the font has: ASCII, and the sign for a space."""
    return "".join(c if c.isascii() or c == "·" else "\\n" if c == "⏎" else ascii(c)[1:-1] for c in token)


def _shade(weights: np.ndarray) -> np.ndarray:
    return np.round(np.sqrt(np.clip(weights, 0.0, 1.0)) * (SHADES - 1)).astype(np.uint8)


@functools.cache
def _palette() -> bytes:
    """The colour of each byte: red, green and blue of the first, then of the next."""
    places = np.linspace(0, len(COLOURS) - 1, SHADES)
    channels = [np.interp(places, np.arange(len(COLOURS)), COLOURS[:, channel]) for channel in range(3)]
    greys = np.linspace(0, 255, WHITE - SHADES + 1)[:, None].repeat(3, axis=1)
    return np.concatenate([np.stack(channels, axis=1), greys]).round().astype(np.uint8).tobytes()
