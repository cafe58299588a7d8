"""The attention of all heads of a model as one picture, with labels."""

import contextlib
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

CELL_PX = 10  # the width of a weight
GAP_PX = 14  # after each head
LINE_PX = 16  # the height of a line of words
BLUE = np.array([29, 78, 216], dtype=float)
FRAME = (209, 217, 224)
INK = (31, 35, 40)
MAX_LABEL_CHARS = 12
FONTS = ("DejaVuSans.ttf", "Arial Unicode.ttf", "arial.ttf")  # Pillow's own has few letters beside Latin


def draw_attention(maps: np.ndarray, tokens: Sequence[str], text: str, cell: int = CELL_PX) -> Image.Image:
    """Draw attention weights: a row of heads for each layer.

    Within a head, each row is a token that attends, and each column one that it attends to. The shade is the square
    root of the weight, so that small weights show.

    Args:
        maps: Attention weights (layers, heads, T, T).
        tokens: The T tokens in words.
        text: What the tokens are, for the title.
        cell: The width of a weight in pixels. If it is less than a line of words, only some of the tokens get a label.
    """
    layers, heads, T, _ = maps.shape
    font = _load_font()
    labels = {i: tokens[i][:MAX_LABEL_CHARS] for i in range(0, T, -(-LINE_PX // (cell + 5)))}
    margin = 6 + max(int(font.getlength(label)) for label in labels.values())
    size = T * cell
    width = margin + heads * (size + GAP_PX)
    height = 2 * LINE_PX + margin + layers * (size + GAP_PX + LINE_PX)
    canvas = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(canvas)
    draw.text((2, 1), f"attention on {text}: rows look at columns; darker is more", INK, font)
    columns = Image.new("RGB", (margin, size), "white")  # the labels of a head's columns, before they are turned
    for i, label in labels.items():
        ImageDraw.Draw(columns).text((3, i * cell + cell // 2), label, INK, font, "lm")
    columns = columns.transpose(Image.Transpose.ROTATE_90)
    for head in range(heads):
        canvas.paste(columns, (margin + head * (size + GAP_PX), LINE_PX))
    shades = np.sqrt(np.clip(maps, 0.0, 1.0))[..., None]
    colours = (255 + shades * (BLUE - 255)).round().astype(np.uint8)
    for layer in range(layers):
        top = 2 * LINE_PX + margin + layer * (size + GAP_PX + LINE_PX)
        for i, label in labels.items():
            draw.text((margin - 3, top + i * cell + cell // 2), label, INK, font, "rm")
        for head in range(heads):
            left = margin + head * (size + GAP_PX)
            draw.text((left, top - LINE_PX + 1), f"layer {layer + 1}, head {head + 1}", INK, font)
            weights = Image.fromarray(colours[layer, head]).resize((size, size), Image.Resampling.NEAREST)
            canvas.paste(weights, (left, top))
            draw.rectangle((left - 1, top - 1, left + size, top + size), outline=FRAME)
    return canvas


def _load_font() -> ImageFont.FreeTypeFont:
    for name in FONTS:
        with contextlib.suppress(OSError):  # this machine lacks it
            return ImageFont.truetype(name, 10)
    font = ImageFont.load_default(10)
    assert isinstance(font, ImageFont.FreeTypeFont)
    return font
