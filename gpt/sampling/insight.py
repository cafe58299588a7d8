"""The insight page: one HTML file that shows why a model continued a text as it did.

It holds what the model expected at each token, what each layer would have said, the queries, keys and values of every
head, from which the page computes the attention that somebody looks at, and what each head adds to the residual stream.
All is that of the position that predicted the chosen token, which is the one before it. The page itself is
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

ALTERNATIVES = 8  # likeliest tokens shown in place of each
LAYER_GUESSES = 3  # likeliest tokens shown of each layer
NUMBERS = 6  # shown of each vector
AT_ONCE = 64  # positions whose logits are in memory together


@dataclass(frozen=True)
class Page:
    """An insight page, which a notebook shows in the cell."""

    html: str = field(repr=False)

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{escape(self.html)}" style="width: 100%; height: 900px; border: 0"></iframe>'

    def save(self, path: str | Path) -> None:
        """Write the page to a file, for a browser."""
        write_text(expand_path(path), self.html)


@torch.inference_mode()
def insight_page(
    model: GPT, tokenizer: Tokenizer, prompt: list[int], new: list[int], sampling: SamplingParams, facts: dict[str, Any]
) -> str:
    """Make the page of a prompt, and of the new tokens that the model wrote while all of it was in its context.

    Of later ones, drawn when the view had lost its beginning, it only says how many they are.
    """
    context, width = model.config.context_length, model.config.d_model // model.config.num_heads
    prompt = prompt[-context:] or [tokenizer.end_of_text]
    ids = (prompt + new)[: context + 1]  # of the last one the model has seen nothing: it is only written
    given = len(prompt)
    x = model.eval()._embed(model.token_embedding(torch.tensor([ids[:-1]], device=model.token_embedding.weight.device)))
    states, layers, biases = [x[0]], [], []  # the residual stream (T, C) before and after each block; its heads
    for block in model.blocks:
        heads, bias = _heads(block.attention, block.norm1(x))  # type: ignore[arg-type, operator]
        layers.append(_packed(*heads, x[0, :, :NUMBERS]))
        biases.append([round(number, 4) for number in bias.tolist()])
        x = block(x)
        states.append(x[0])
    data: dict[str, Any] = {
        "tokens": ids,
        "given": given,
        "omitted": given + len(new) - len(ids),
        "heads": model.config.num_heads,
        "width": width,
        "channels": model.config.d_model,
        "biases": biases,
        "numbers": min(NUMBERS, width),
        "facts": facts,
        "expected": list(_expected(model, states[-1], ids, given, sampling)),
        "layers": [list(_guesses(model, state)) for state in states],
    }
    shown = set(ids) | {one[0] for row in data["expected"] for one in row["likeliest"]}
    shown |= {guess[0] for layer in data["layers"] for row in layer for guess in row}
    data["vocabulary"] = {i: token_label(tokenizer.decode_bytes([i])) for i in sorted(shown)}
    page = (ASSETS / "insight.html").read_text(encoding="utf-8")
    page = page.replace("/* style */", (ASSETS / "insight.css").read_text(encoding="utf-8"))
    page = page.replace("/* script */", (ASSETS / "insight.js").read_text(encoding="utf-8"))
    # A script element would end at the first "</script", whatever it is in.
    script = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    scripts = [f'<script type="application/json" id="data">{script}</script>\n']
    scripts += [f'<script type="text/plain" id="layer{i}">{packed}</script>\n' for i, packed in enumerate(layers)]
    return page.replace("<!-- data -->", "".join(scripts))


def _heads(attention: MultiHeadAttention, x: Tensor) -> tuple[list[Tensor], Tensor]:
    """Queries and keys (1, H, T, D), and the first numbers of values and of what each head adds to the residual stream.

    The bias of the output projection, which is returned last, belongs to no head.
    """
    queries, keys, values = attention._project(x)
    contexts = attention._attend(queries, keys, values, None)[0]  # (H, T, D)
    H, _, D = contexts.shape
    # By what it does, since its weights may be packed: the bias, and below it the transposed weights.
    known = attention.out_proj(torch.cat([x.new_zeros(1, H * D), torch.eye(H * D, device=x.device)])).float()
    bias, weights = known[0, :NUMBERS], (known[1:] - known[0])[:, :NUMBERS].view(H, D, -1)
    return [queries, keys, values[..., :NUMBERS], contexts.float() @ weights], bias


def _packed(*parts: Tensor) -> str:
    """What the page computes a layer's attention from, and what came of it.

    They are in bf16, which loses nothing if the model computes in it, and else leaves three digits. All low bytes come
    before the high ones, whose few signs and exponents a Huffman code then stores in a third of the room.
    """
    numbers = torch.cat([part.flatten().bfloat16() for part in parts]).cpu()
    halves = numbers.view(torch.uint8).view(-1, 2).T.numpy().tobytes()
    deflate = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY)  # nothing repeats: searching for it costs time and bytes
    return base64.b64encode(deflate.compress(halves) + deflate.flush()).decode("ascii")


def _logits(model: GPT, state: Tensor) -> Iterator[Tensor]:
    """The logits (V,) at each position of a residual stream (T, C), as if its layer were the last."""
    for part in state.split(AT_ONCE):
        yield from model.head(model.final_norm(part).to(model.dtype)).float()


def _expected(model: GPT, state: Tensor, ids: list[int], given: int, sampling: SamplingParams) -> Iterator[dict]:
    """For each token after the first: its surprise in bits, its rank, and the likeliest tokens in its place.

    Each of those has its probability and, in the continuation, the one that temperature and filters left it.
    """
    yield {"bits": None, "rank": 0, "likeliest": []}  # nothing comes before the first token
    for place, (logits, token) in enumerate(zip(_logits(model, state), ids[1:], strict=True), start=1):
        logprobs = logits.log_softmax(-1)
        likeliest: list[int] = logprobs.topk(min(ALTERNATIVES, len(logprobs))).indices.tolist()
        shown = likeliest if token in likeliest else [*likeliest[:-1], token]
        row: list[list] = [[i, round(math.exp(logprobs[i]), 5)] for i in shown]
        if place >= given and sampling.temperature > 0:
            previous = torch.tensor([ids[:place]], device=logits.device)
            left = filter_logits(logits[None], previous, sampling)[0].softmax(-1)
            row = [[*one, round(float(left[one[0]]), 5)] for one in row]
        rank = int((logprobs > logprobs[token]).sum()) + 1
        yield {"bits": round(-float(logprobs[token]) / math.log(2), 3), "rank": rank, "likeliest": row}


def _guesses(model: GPT, state: Tensor) -> Iterator[list]:
    """What a layer would have said at each position: its likeliest next tokens with their probabilities.

    Source: nostalgebraist 2020, "interpreting GPT: the logit lens".
    """
    for logits in _logits(model, state):
        values, order = logits.softmax(-1).topk(min(LAYER_GUESSES, len(logits)))
        yield [[i, round(p, 4)] for i, p in zip(order.tolist(), values.tolist(), strict=True)]
