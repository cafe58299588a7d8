"""The insight page: one HTML file that shows why a model continued a text as it did.

For each token it holds the model's expectations, the guesses of each layer, and what each head adds to the residual
stream. It also holds the queries, keys and values of every head; the page computes attention weights from them. The
position before a token predicted it, so the figures of a token are from that position. The page itself is
gpt/assets/insight.*.

Letters in shapes: T tokens, V vocabulary, L layers, H heads, D head_dim, C d_model.
"""

import base64
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt.data.chunking import token_label
from gpt.data.tokenizer import Tokenizer
from gpt.files import ASSETS, expand_path, write_text
from gpt.model.attention import MultiHeadAttention
from gpt.model.transformer import GPT
from gpt.sampling.generation import SamplingParams, filter_logits

NUM_ALTERNATIVES = 8  # likeliest tokens to show in place of each token
NUM_GUESSES = 3  # likeliest tokens to show for each layer
NUMBERS = 6  # to show of each vector
LOGITS_POSITIONS = 64  # whose logits are in memory together


@dataclass(frozen=True)
class Page:
    """An insight page. As the last value of a notebook's cell, it is shown there."""

    html: str = field(repr=False)

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{escape(self.html)}" style="width: 100%; height: 900px; border: 0"></iframe>'

    def save(self, path: str | Path) -> None:
        """Write the page to a file, for a browser."""
        write_text(expand_path(path), self.html)


@torch.inference_mode()
def insight_page(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: list[int],
    new_tokens: list[int],
    sampling: SamplingParams,
    metadata: dict[str, Any],
) -> str:
    """Return the HTML of a page. It shows the tokens that the model wrote while the whole text was in its context.

    Args:
        model: The model that wrote the new tokens.
        tokenizer: Its tokenizer.
        prompt: The token ids of the prompt.
        new_tokens: The token ids that the model wrote. The page only counts those that do not fit the context.
        sampling: How they were drawn.
        metadata: Names and values for the top of the page.
    """
    context_length = model.config.context_length
    head_dim = model.config.d_model // model.config.num_heads
    prompt = prompt[-context_length:] or [tokenizer.end_of_text]
    ids = (prompt + new_tokens)[: context_length + 1]  # the last token is only a target
    idx = torch.tensor([ids[:-1]], device=model.token_embedding.weight.device)
    x = model.eval()._embed(model.token_embedding(idx))
    states = [x[0]]  # the residual stream (T, C) before and after each block
    layers, biases = [], []
    for block in model.blocks:
        heads, bias = _describe_heads(block.attention, block.norm1(x))  # type: ignore[arg-type, operator]
        layers.append(_pack(*heads, x[0, :, :NUMBERS]))
        biases.append([round(number, 4) for number in bias.tolist()])
        x = block(x)
        states.append(x[0])
    data: dict[str, Any] = {
        "tokens": ids,
        "given": len(prompt),
        "omitted": len(prompt) + len(new_tokens) - len(ids),
        "heads": model.config.num_heads,
        "width": head_dim,
        "channels": model.config.d_model,
        "biases": biases,
        "numbers": min(NUMBERS, head_dim),
        "facts": metadata,
        "expected": list(_expectations(model, states[-1], ids, len(prompt), sampling)),
        "layers": [list(_guesses(model, state)) for state in states],
    }
    shown = set(ids)
    for row in data["expected"]:
        shown |= {alternative[0] for alternative in row["likeliest"]}
    for layer in data["layers"]:
        for guesses in layer:
            shown |= {guess[0] for guess in guesses}
    data["vocabulary"] = {i: token_label(tokenizer.decode_bytes([i])) for i in sorted(shown)}
    page = (ASSETS / "insight.html").read_text(encoding="utf-8")
    page = page.replace("/* style */", (ASSETS / "insight.css").read_text(encoding="utf-8"))
    page = page.replace("/* script */", (ASSETS / "insight.js").read_text(encoding="utf-8"))
    # A script element ends at the first "</script", also within a string.
    content = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    scripts = [f'<script type="application/json" id="data">{content}</script>\n']
    scripts += [f'<script type="text/plain" id="layer{i}">{layer}</script>\n' for i, layer in enumerate(layers)]
    return page.replace("<!-- data -->", "".join(scripts))


def _describe_heads(attention: MultiHeadAttention, x: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return what the page shows of a layer's heads, and the first numbers of the output projection's bias.

    Of the heads: queries and keys (1, H, T, D), and the first numbers of values and of what each head adds to the
    residual stream.
    """
    queries, keys, values = attention._project(x)
    contexts = attention._attend(queries, keys, values, None)[0]  # (H, T, D)
    H, _, D = contexts.shape
    # The weights may be packed, so they are measured: zeros give the bias, the identity below it the weights.
    outputs = attention.out_proj(torch.cat([x.new_zeros(1, H * D), torch.eye(H * D, device=x.device)])).float()
    bias = outputs[0, :NUMBERS]
    weights = (outputs[1:] - outputs[0])[:, :NUMBERS].view(H, D, -1)
    return [queries, keys, values[..., :NUMBERS], contexts.float() @ weights], bias


def _pack(*parts: Tensor) -> str:
    """Return the numbers of a layer in bf16, compressed, in base64.

    bf16 loses nothing if the model computes in it, and else leaves three digits. All low bytes come before the high
    ones. These have few signs and exponents, so a Huffman code stores them in a third of the room.
    """
    numbers = torch.cat([part.flatten().bfloat16() for part in parts]).cpu()
    halves = numbers.view(torch.uint8).view(-1, 2).T.numpy().tobytes()
    deflate = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY)  # nothing repeats: searching for it costs time and bytes
    return base64.b64encode(deflate.compress(halves) + deflate.flush()).decode("ascii")


def _logits(model: GPT, state: Tensor) -> Iterator[Tensor]:
    """Yield the logits (V,) at each position of a residual stream (T, C), as if its layer were the last."""
    for part in state.split(LOGITS_POSITIONS):
        yield from model.head(model.final_norm(part).to(model.dtype)).float()


def _expectations(
    model: GPT, state: Tensor, ids: list[int], prompt_length: int, sampling: SamplingParams
) -> Iterator[dict]:
    """Yield the surprise of each token in bits, its rank, and the likeliest tokens in its place.

    Each of these has its probability. For a new token, it also has its probability after temperature and filters.
    """
    yield {"bits": None, "rank": 0, "likeliest": []}  # nothing comes before the first token
    for position, (logits, token) in enumerate(zip(_logits(model, state), ids[1:], strict=True), start=1):
        logprobs = logits.log_softmax(-1)
        likeliest: list[int] = logprobs.topk(min(NUM_ALTERNATIVES, len(logprobs))).indices.tolist()
        if token not in likeliest:
            likeliest[-1] = token
        alternatives: list[list] = [[i, round(math.exp(logprobs[i]), 5)] for i in likeliest]
        if position >= prompt_length and sampling.temperature > 0:
            previous = torch.tensor([ids[:position]], device=logits.device)
            filtered = filter_logits(logits[None], previous, sampling)[0].softmax(-1)
            for alternative in alternatives:
                alternative.append(round(float(filtered[alternative[0]]), 5))
        rank = int((logprobs > logprobs[token]).sum()) + 1
        yield {"bits": round(-float(logprobs[token]) / math.log(2), 3), "rank": rank, "likeliest": alternatives}


def _guesses(model: GPT, state: Tensor) -> Iterator[list]:
    """Yield the likeliest next tokens at each position, with their probabilities, as if this layer were the last.

    Source: nostalgebraist 2020, "interpreting GPT: the logit lens".
    """
    for logits in _logits(model, state):
        probabilities, order = logits.softmax(-1).topk(min(NUM_GUESSES, len(logits)))
        yield [[i, round(p, 4)] for i, p in zip(order.tolist(), probabilities.tolist(), strict=True)]
