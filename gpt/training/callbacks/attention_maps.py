"""Pictures of attention: a map for each head, with its tokens along both sides."""

import math

import numpy as np
import torch
from lightning import Trainer
from PIL import Image, ImageDraw, ImageFont

from gpt.sampling.scoring import Score
from gpt.text.pieces import label
from gpt.training.callbacks.base import StepCallback
from gpt.training.metrics.curves import Curves
from gpt.training.module import GPTModule

TOKENS = 24  # as many as have room for labels

CELL, BESIDE, ABOVE, GAP = 12, 64, 58, 10  # pixels: of a weight, for labels, between heads
LETTERS = 10  # of a label
FONT_SIZE = 10
# From nothing to all of the attention, dark to light, which also reads in grey (five points of viridis).
COLOURS = np.array([[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], dtype=float)


class AttentionMaps(StepCallback):
    """Draws each layer's attention after each validation, always on the first tokens of the validation text."""

    def __init__(self, curves: Curves):
        self._curves = curves

    def on_validated(self, trainer: Trainer, module: GPTModule, step: int, score: Score) -> None:
        if self._curves.writer is None:
            return
        tokenizer, text = module.corpora.tokenizer, module.corpora.sources[0].validation
        ids = text[: min(TOKENS, module.config.model.context_length, len(text))].tolist()
        model = module.model.eval()
        with torch.compiler.set_stance("force_eager"):
            maps = model.attention_maps(torch.tensor([ids], device=module.device))[0].float().cpu()  # (L, H, T, T)
        model.train()
        labels = [label(tokenizer.decode_bytes([i])) for i in ids]
        for layer, heads in enumerate(maps, start=1):
            self._curves.write_picture(
                f"weights/attention/layer_{layer}", attention_picture(heads.numpy(), labels), step
            )


def attention_picture(weights: np.ndarray, tokens: list[str]) -> Image.Image:
    """Draw attention weights (H, T, T): a row for each token that looks.

    Colours go by the square root of the weights, so that small ones show.
    """
    heads, T, _ = weights.shape
    side, font = T * CELL, ImageFont.load_default(FONT_SIZE)
    beside, above = Image.new("RGB", (BESIDE, side), "white"), Image.new("RGB", (ABOVE - 18, side), "white")
    for i, token in enumerate(map(_escaped, tokens)):
        middle = (i + 0.5) * CELL
        ImageDraw.Draw(beside).text((BESIDE - 6, middle), token[:LETTERS], "black", font, anchor="rm")
        ImageDraw.Draw(above).text((2, middle), token[: LETTERS - 2], "black", font, anchor="lm")
    above = above.rotate(90, expand=True)

    columns = math.ceil(math.sqrt(heads))
    width, height = BESIDE + side + GAP, ABOVE + side + GAP  # of a head with its labels
    picture = Image.new("RGB", (columns * width, math.ceil(heads / columns) * height), "white")
    cells = np.where(np.tri(T, dtype=bool)[..., None], _colours(weights), np.uint8(255))  # (H, T, T, 3)
    for head in range(heads):
        left, top = head % columns * width, head // columns * height
        ImageDraw.Draw(picture).text((left + BESIDE, top + 2), f"head {head + 1}", "black", font)
        picture.paste(beside, (left, top + ABOVE))
        picture.paste(above, (left + BESIDE, top + 18))
        map_of_head = Image.fromarray(cells[head]).resize((side, side), Image.Resampling.NEAREST)
        picture.paste(map_of_head, (left + BESIDE, top + ABOVE))
    return picture


def _escaped(token: str) -> str:
    """The token in characters that the font has: ASCII, and the sign for a space."""
    return "".join(c if c.isascii() or c == "·" else "\\n" if c == "⏎" else ascii(c)[1:-1] for c in token)


def _colours(weights: np.ndarray) -> np.ndarray:
    """The colour of each weight (...): red, green and blue (..., 3)."""
    shades = np.sqrt(np.clip(weights, 0.0, 1.0)) * (len(COLOURS) - 1)
    channels = [np.interp(shades, np.arange(len(COLOURS)), COLOURS[:, channel]) for channel in range(3)]
    return np.stack(channels, axis=-1).round().astype(np.uint8)
