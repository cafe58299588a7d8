"""The attention of all heads of a model, as one picture, with the words that it needs."""

import contextlib
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

CELL_PX, GAP_PX, LINE_PX = 10, 14, 16  # pixels: of a weight, after each head, and of a line of words
BLUE, FRAME, INK = np.array([29, 78, 216], dtype=float), (209, 217, 224), (31, 35, 40)
LONGEST = 12  # characters of a token that are shown
FONTS = ("DejaVuSans.ttf", "Arial Unicode.ttf", "arial.ttf")  # with more letters than Pillow's own, which has Latin


def draw_attention(maps: np.ndarray, tokens: Sequence[str], text: str, cell: int = CELL_PX) -> Image.Image:
    """Draw attention weights (layers, heads, T, T) on T tokens: a row of heads for each layer.

    Within a head, each row is a token that looks, and each column one that it looks at; `text` says what these tokens
    are. The darker the blue, the more attention, by the square root of the weights, so that small ones show. A weight
    is `cell` pixels wide; where that is less than a line of words, only some of the tokens are named.
    """
    layers, heads, T, _ = maps.shape
    font, named = _font(), range(0, T, -(-LINE_PX // (cell + 5)))
    words = [token[:LONGEST] for token in tokens]
    margin, size = 6 + max(int(font.getlength(words[i])) for i in named), T * cell
    canvas = Image.new(
        "RGB", (margin + heads * (size + GAP_PX), 2 * LINE_PX + margin + layers * (size + GAP_PX + LINE_PX)), "white"
    )
    draw = ImageDraw.Draw(canvas)
    about = f"attention on {text}: rows look at columns; darker is more"
    draw.text((2, 1), about, INK, font)
    for head in range(heads):
        column = Image.new("RGB", (margin, size), "white")  # drawn level, and then turned
        for i in named:
            ImageDraw.Draw(column).text((3, i * cell + cell // 2), words[i], INK, font, "lm")
        canvas.paste(column.transpose(Image.Transpose.ROTATE_90), (margin + head * (size + GAP_PX), LINE_PX))
    shades = np.sqrt(np.clip(maps, 0.0, 1.0))[..., None]
    colours = (255 + shades * (BLUE - 255)).round().astype(np.uint8)
    for layer in range(layers):
        top = 2 * LINE_PX + margin + layer * (size + GAP_PX + LINE_PX)
        for i in named:
            draw.text((margin - 3, top + i * cell + cell // 2), words[i], INK, font, "rm")
        for head in range(heads):
            left = margin + head * (size + GAP_PX)
            draw.text((left, top - LINE_PX + 1), f"layer {layer + 1}, head {head + 1}", INK, font)
            canvas.paste(
                Image.fromarray(colours[layer, head]).resize((size, size), Image.Resampling.NEAREST), (left, top)
            )
            draw.rectangle((left - 1, top - 1, left + size, top + size), outline=FRAME)
    return canvas


def _font() -> ImageFont.FreeTypeFont:
    for name in FONTS:
        with contextlib.suppress(OSError):  # this machine lacks it
            return ImageFont.truetype(name, 10)
    font = ImageFont.load_default(10)
    assert isinstance(font, ImageFont.FreeTypeFont)
    return font
