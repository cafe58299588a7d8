"""The insight page: its numbers are the model's, and a browser shows them."""

import base64
import json
import math
import re
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from gpt.data.tokenizer import byte_tokenizer
from gpt.model.transformer import GPT, GPTConfig
from gpt.sampling.generation import SamplingParams, filter_logits, generate
from gpt.sampling.insight import NUM_ALTERNATIVES, NUMBERS, insight_page
from gpt.sampling.packed import pack_weights
from harness import import_or_skip
from models import random_model

PROMPT = "a</script><b>\n"
SAMPLING = SamplingParams(temperature=0.7, top_p=0.6, repetition_penalty=1.3)
METADATA = {"seed": 11, "checkpoint": "runs/</script><!--\u2028/best.ckpt"}
L, H, D, CONTEXT = 2, 3, 7, 29


def make_model(head_dim: int = D, std: float = 0.6) -> GPT:
    """Return a model of bytes whose predictions differ from each other."""
    config = GPTConfig(vocab_size=257, context_length=CONTEXT, d_model=H * head_dim, num_layers=L, num_heads=H)
    return random_model(config, std, unit_embeddings=False).requires_grad_(False)


@pytest.fixture(scope="module")
def model() -> GPT:
    return make_model()


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return [*PROMPT.encode(), *np.random.default_rng(3).integers(32, 127, 9).tolist()]


def page_of(model: GPT, ids: list[int], prompt_length: int, sampling: SamplingParams = SAMPLING) -> str:
    return insight_page(model, byte_tokenizer(), ids[:prompt_length], ids[prompt_length:], sampling, METADATA)


@pytest.fixture(scope="module")
def page(model, ids) -> str:
    return page_of(model, ids, len(PROMPT))


def data_of(page: str) -> dict:
    (content,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(content)


def numbers_of(page: str, layer: int, T: int, head_dim: int) -> list[torch.Tensor]:
    """Return the numbers that a page holds of a layer.

    They are queries and keys, each (H, T, D), and the first numbers of values and of what each head adds, each
    (H, T, NUMBERS), and of the residual stream before: (1, T, NUMBERS).
    """
    (content,) = re.findall(rf'id="layer{layer}">(.*?)</script>', page)
    low, high = np.frombuffer(zlib.decompress(base64.b64decode(content)), np.uint8).reshape(2, -1).astype(np.uint32)
    numbers = torch.from_numpy(((high << 24) | (low << 16)).view("f4"))
    first = min(NUMBERS, head_dim)
    shapes = [(H, T, head_dim), (H, T, head_dim), (H, T, first), (H, T, first), (1, T, first)]
    parts = numbers.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def test_expectations(model, ids, page):
    """Surprise and probabilities, before and after the filters, are the model's."""
    data, logits = data_of(page), model(torch.tensor([ids]))[0]
    assert [data[key] for key in ("tokens", "given", "heads", "width", "numbers")] == [ids, len(PROMPT), H, D, NUMBERS]
    assert data["expected"][0] == {"bits": None, "rank": 0, "likeliest": []}
    for i in range(1, len(ids)):
        p = logits[i - 1].softmax(-1)
        row = data["expected"][i]
        assert row["rank"] == p.argsort(descending=True).tolist().index(ids[i]) + 1
        assert row["bits"] == pytest.approx(-math.log2(p[ids[i]]), abs=1e-3)
        tokens, probabilities, *filtered = zip(*row["likeliest"], strict=True)
        assert ids[i] in tokens and list(tokens[:-1]) == p.topk(NUM_ALTERNATIVES - 1).indices.tolist()
        assert probabilities == pytest.approx(p[list(tokens)].tolist(), abs=1e-5)
        assert len(filtered) == (i >= len(PROMPT))
        if filtered:
            q = filter_logits(logits[i - 1 : i], torch.tensor([ids[:i]]), SAMPLING)[0].softmax(-1)
            assert filtered[0] == pytest.approx(q[list(tokens)].tolist(), abs=1e-5)
            assert 0.0 in filtered[0]


def test_greedy_tokens_have_no_filtered_probability(model):
    data = data_of(page_of(model, list(range(40, 49)), 8, SamplingParams(temperature=0)))
    assert {len(alternative) for alternative in data["expected"][8]["likeliest"]} == {2}


def test_layers(model, ids, page):
    """The guesses of the last layer are the model's. The first guesses follow from the embedding alone."""
    layers = data_of(page)["layers"]
    assert (len(layers), len(layers[0]), len(layers[0][0])) == (L + 1, len(ids) - 1, 3)
    x = model.token_embedding.weight[ids[:-1]] + model.position_embedding.weight[: len(ids) - 1]
    for layer, logits in ((0, model.head(model.final_norm(x))), (L, model(torch.tensor([ids[:-1]]))[0])):
        best = logits.softmax(-1).topk(3)
        assert [[i for i, _ in row] for row in layers[layer]] == best.indices.tolist()
        assert torch.tensor([[p for _, p in row] for row in layers[layer]]).allclose(best.values, atol=1e-4)


def test_attention(model, ids, page):
    """Queries and keys give the attention weights of every head."""
    ids = ids[:-1]  # the last one is only a target
    T = len(ids)
    maps = model.attention_maps(torch.tensor([ids]))[0]
    for layer in range(L):
        queries, keys, *_ = numbers_of(page, layer, T, D)
        scores = (queries @ keys.transpose(1, 2) / math.sqrt(D)).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
        torch.testing.assert_close(scores.softmax(-1), maps[layer], atol=5e-2, rtol=0)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@torch.no_grad()
def test_what_heads_add(ids, precision):
    """The parts of all heads and the bias sum to what the layer's attention adds to the residual stream."""
    model = make_model(head_dim=8, std=0.1)
    x = model._embed(model.token_embedding(torch.tensor([ids[:-1]])))
    expected = []
    for block in model.blocks:
        expected.append((x[0], block.attention(block.norm1(x))[0]))
        x = block(x)
    page = page_of(model if precision == "fp32" else pack_weights(model, precision), ids, 3)
    for layer, (before, added) in enumerate(expected):
        *_, parts, residual = numbers_of(page, layer, len(ids) - 1, 8)
        total = parts.sum(0) + torch.tensor(data_of(page)["biases"][layer])
        torch.testing.assert_close(total, added[:, :NUMBERS], atol=0.05, rtol=0.02)
        torch.testing.assert_close(residual[0], before[:, :NUMBERS], atol=0.05, rtol=0.02)


def test_bf16_is_stored_exactly(ids):
    """The numbers of a model that computes in bf16 are stored bit for bit."""
    model = make_model()
    model.set_compute_dtype(torch.bfloat16)
    page, ids = page_of(model, ids, 3), ids[:-1]
    x = model.token_embedding.weight[ids] + model.position_embedding.weight[: len(ids)]
    expected = model.blocks[0].attention._project(model.blocks[0].norm1(x)[None])
    for stored, vectors in zip(numbers_of(page, 0, len(ids), D)[:3], expected, strict=True):
        assert vectors.dtype == torch.bfloat16
        assert stored.equal(vectors[0, ..., : stored.shape[-1]].float())


@pytest.mark.parametrize(("prompt_length", "new"), [(8, 22), (8, 53), (37, 7)])
def test_surprise_is_from_the_moment_of_sampling(model, prompt_length, new):
    """The page counts tokens that were drawn after the text had outgrown the context, and shows none of them."""
    prompt = np.random.default_rng(3).integers(32, 127, prompt_length).tolist()
    logits: list[torch.Tensor] = []
    idx, generator = torch.tensor([prompt[-CONTEXT:]]), torch.Generator().manual_seed(3)
    tokens = generate(model, idx, new, SAMPLING, generator, on_logits=logits.append)
    new_tokens = [int(token) for token in tokens]
    data = data_of(page_of(model, prompt + new_tokens, prompt_length))
    given = min(prompt_length, CONTEXT)
    assert (data["tokens"], data["given"]) == ([*prompt[-CONTEXT:], *new_tokens][: CONTEXT + 1], given)
    assert len(data["tokens"]) - given + data["omitted"] == new
    for i, token in enumerate(data["tokens"][given:]):
        bits = -logits[i][0].log_softmax(-1)[token].item() / math.log(2)
        assert data["expected"][given + i]["bits"] == pytest.approx(bits, abs=1e-2)


def test_page_is_self_contained(page):
    """It loads nothing, and no text can become part of its code."""
    assert not re.search(r"https?:|@import|url\(|src=|href=|fetch\(", page)
    assert page.count("</script>") == page.count("<script") == 2 + L
    assert not re.search(r"/\* (style|script) \*/|<!--", page)
    assert data_of(page)["facts"] == METADATA


@pytest.fixture(scope="module")
def browser():
    sync_api = import_or_skip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")  # else playwright's own
    with sync_api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip(f"NO BROWSER TEST: run `playwright install chromium` ({str(error).splitlines()[0]})")
        yield browser
        browser.close()


@pytest.mark.slow
def test_in_a_browser(model, ids, page, browser, tmp_path: Path):
    """A click and a key choose a token. The shades of all heads are the model's. Nothing is wider than a phone."""
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    errors: list[str] = []
    tab = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme="dark")
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    tab.goto(f"file://{tmp_path}/page.html")
    tab.wait_for_selector("#steps h3")
    chosen = tab.locator("#chosen")
    tab.locator("#token3").click()
    assert chosen.inner_text().startswith(f"token 4 of {len(ids)}: \u201cs\u201d, probability ")
    tab.locator("#text").focus()
    tab.keyboard.press("ArrowRight")
    bits = data_of(page)["expected"][4]["bits"]
    assert chosen.inner_text().startswith(f"token 5 of {len(ids)}: ")
    assert f"surprise {bits:.2f} bits" in chosen.inner_text()

    tab.get_by_role("radio", name="attention").click()
    tab.get_by_role("radio", name="layer 1, head 1").click()
    tab.get_by_text("How head 1 of layer 1 looked back from").wait_for()  # it was unpacked
    shades = tab.eval_on_selector_all(
        "#heads canvas",
        "all => all.map(canvas => [...canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data])",
    )
    maps = model.attention_maps(torch.tensor([ids[:-1]]))[0]
    for head, shown in zip(maps.flatten(0, 1), shades, strict=True):
        opacity = torch.tensor(shown).view(*head.shape, 4)[..., 3]
        torch.testing.assert_close(opacity.float(), 255 * head.sqrt(), atol=8, rtol=0)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    assert errors == []
    tab.close()
