"""The insight page: its numbers are the model's, and a real browser shows them."""

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

from gpt.model.transformer import GPT, GPTConfig
from gpt.sampling.generation import Sampling, filter_logits
from gpt.sampling.insight import NUMBERS, insight_page
from gpt.text.tokenizer import byte_tokenizer

PROMPT = "a</script><b>\n"
SAMPLING = Sampling(temperature=0.7, top_p=0.6, repetition_penalty=1.3)
FACTS = {"seed": 11, "checkpoint": "runs/</script><!--\u2028/best.ckpt"}
L, H, D = 2, 3, 7


@pytest.fixture(scope="module")
def model() -> GPT:
    torch.manual_seed(7)
    model = GPT(GPTConfig(vocab_size=257, context_length=29, d_model=H * D, num_layers=L, num_heads=H))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(7)  # predictions that differ
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return [*PROMPT.encode(), *np.random.default_rng(3).integers(32, 127, 9).tolist()]


@pytest.fixture(scope="module")
def page(model, ids) -> str:
    return "".join(insight_page(model, byte_tokenizer(), ids, len(PROMPT), SAMPLING, FACTS))


def data_of(page: str) -> dict:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(found)


def projections(page: str, layer: int, T: int) -> list[torch.Tensor]:
    """The queries and keys, each (H, T, D), and the first numbers of the values, (H, T, NUMBERS), that a page holds."""
    (found,) = re.findall(rf'id="layer{layer}">(.*?)</script>', page)
    halves = np.frombuffer(zlib.decompress(base64.b64decode(found)), np.uint8).reshape(2, -1)
    numbers = torch.from_numpy(((halves[1].astype(np.uint32) << 24) | (halves[0].astype(np.uint32) << 16)).view("f4"))
    parts = numbers.split([H * T * D, H * T * D, H * T * NUMBERS])
    return [part.view(H, T, -1) for part in parts]


def test_expectations(model, ids, page):
    """Surprise, probabilities and what the filters left are those of the model."""
    data, logits = data_of(page), model(torch.tensor([ids]))[0]
    assert [data[key] for key in ("tokens", "given", "heads", "width", "numbers")] == [ids, len(PROMPT), H, D, NUMBERS]
    assert data["expected"][0] == {"bits": None, "likeliest": []}
    for i in range(1, len(ids)):
        p = logits[i - 1].softmax(-1)
        shown = data["expected"][i]
        assert shown["bits"] == pytest.approx(-math.log2(p[ids[i]]), abs=1e-3)
        tokens = [one[0] for one in shown["likeliest"]]
        assert len(tokens) == 8 and ids[i] in tokens and tokens[:7] == p.topk(7).indices.tolist()
        assert [one[1] for one in shown["likeliest"]] == pytest.approx(p[tokens].tolist(), abs=1e-5)
        assert {len(one) for one in shown["likeliest"]} == {2 if i < len(PROMPT) else 3}
        if i >= len(PROMPT):
            left = filter_logits(logits[i - 1 : i], torch.tensor([ids[:i]]), SAMPLING)[0].softmax(-1)
            assert [one[2] for one in shown["likeliest"]] == pytest.approx(left[tokens].tolist(), abs=1e-5)
            assert 0.0 in [one[2] for one in shown["likeliest"]]


def test_layers(model, ids, page):
    """The last layer's guesses are the model's, and the first says what the embedding alone would."""
    layers = data_of(page)["layers"]
    assert (len(layers), len(layers[0]), len(layers[0][0])) == (L + 1, len(ids), 3)
    x = model.token_embedding.weight[ids] + model.position_embedding.weight[: len(ids)]
    for layer, logits in ((0, model.head(model.final_norm(x))), (L, model(torch.tensor([ids]))[0])):
        best = logits.softmax(-1).topk(3)
        assert [[i for i, _ in row] for row in layers[layer]] == best.indices.tolist()
        assert torch.tensor([[p for _, p in row] for row in layers[layer]]).allclose(best.values, atol=1e-4)


def test_attention(model, ids, page):
    """Queries, keys and values are the model's to three digits, and give the attention weights of every head."""
    maps = model.attention_maps(torch.tensor([ids]))[0]
    T, x = len(ids), model.token_embedding.weight[ids] + model.position_embedding.weight[: len(ids)]
    expected = model.blocks[0].attention._project(model.blocks[0].norm1(x)[None])
    for stored, vectors in zip(projections(page, 0, T), expected, strict=True):
        torch.testing.assert_close(stored, vectors[0, ..., : stored.shape[-1]], rtol=2**-8, atol=0)
    for layer in range(L):
        queries, keys, _ = projections(page, layer, T)
        scores = (queries @ keys.transpose(1, 2) / math.sqrt(D)).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
        torch.testing.assert_close(scores.softmax(-1), maps[layer], atol=5e-2, rtol=0)


def test_bf16_is_stored_exactly(ids):
    """A model that computes in bf16 loses nothing, and its numbers are found again bit for bit."""
    torch.manual_seed(5)
    model = GPT(GPTConfig(vocab_size=257, context_length=29, d_model=H * D, num_layers=1, num_heads=H))
    model.compute_in(torch.bfloat16)
    page = "".join(insight_page(model, byte_tokenizer(), ids, 3, SAMPLING, {}))
    x = model.token_embedding.weight[ids] + model.position_embedding.weight[: len(ids)]
    expected = model.blocks[0].attention._project(model.blocks[0].norm1(x)[None])
    for stored, vectors in zip(projections(page, 0, len(ids)), expected, strict=True):
        assert vectors.dtype == torch.bfloat16
        assert stored.equal(vectors[0, ..., : stored.shape[-1]].float())


def test_only_what_the_model_sees(model):
    """Of a text longer than the context, the end is shown, and what is left of the prompt."""
    long = list(range(40, 40 + 35))
    data = data_of("".join(insight_page(model, byte_tokenizer(), long, 8, SAMPLING, {})))
    assert (data["tokens"], data["given"]) == (long[6:], 2)
    greedy = data_of("".join(insight_page(model, byte_tokenizer(), long[:9], 8, Sampling(temperature=0), {})))
    assert {len(one) for one in greedy["expected"][8]["likeliest"]} == {2}


def test_self_contained(page):
    """Nothing is loaded from elsewhere, and no text can become part of the page's code."""
    assert not re.search(r"https?:|@import|url\(|src=|href=|fetch\(", page)
    assert page.count("</script>") == page.count("<script") == 2 + L
    assert not re.search(r"/\* (style|script) \*/|<!--", page)
    assert data_of(page)["facts"] == FACTS


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="NO BROWSER TEST: pip install playwright")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")  # else playwright's own
    with sync_api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip(f"NO BROWSER TEST: run `playwright install chromium` ({str(error).splitlines()[0]})")
        yield browser
        browser.close()


@pytest.mark.slow
@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser(model, ids, page, browser, tmp_path: Path, width, scheme):
    """Clicks, keys and the mouse choose tokens, layers and heads; nothing is wider than a phone."""
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    errors: list[str] = []
    tab = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    tab.goto(f"file://{tmp_path}/page.html")
    tab.wait_for_selector("#steps h3")
    chosen = lambda: tab.locator("#chosen").inner_text()  # noqa: E731
    count = len(ids)
    assert chosen().startswith(f"token {len(PROMPT) + 1} of {count}: ")
    tab.locator("#token3").click()
    assert chosen().startswith(f"token 4 of {count}: \u201cs\u201d, probability ")
    tab.locator("#text").focus()
    for key, token in (("ArrowRight", 5), ("ArrowLeft", 4), ("ArrowDown", 14), ("End", count), ("Home", 1)):
        tab.keyboard.press(key)
        assert chosen().startswith(f"token {token} of {count}: ")
    assert "nothing was expected" in chosen()
    tab.keyboard.press("End")
    bits = data_of(page)["expected"][-1]["bits"]
    assert f"surprise {bits:.2f} bits" in chosen()
    assert tab.locator("#expected tr").count() == 1 + 8
    assert tab.locator("#layers tr").count() == L + 1

    tab.get_by_role("radio", name="attention").click()
    tab.locator("#layer-buttons button").nth(0).click()
    tab.get_by_text("How head 1 of layer 1 looks back from").wait_for()  # it was unpacked
    tab.locator("#layer-buttons button").nth(0).press("ArrowRight")
    tab.locator("#head-buttons button").nth(0).click()
    tab.keyboard.press("ArrowRight")
    weights = model.attention_maps(torch.tensor([ids]))[0, 1, 1]
    strengths = lambda: tab.eval_on_selector_all(  # noqa: E731
        ".token", "all => all.map(span => Number(span.style.getPropertyValue('--strength')))"
    )
    assert strengths() == pytest.approx((0.85 * weights[-1] / weights[-1].max()).tolist(), abs=0.05)
    tab.locator("#token6").hover()
    assert strengths() == pytest.approx((0.85 * weights[6] / weights[6].max()).tolist(), abs=0.05)
    assert "How head 2 of layer 2 looks back from" in tab.locator("#head-how").inner_text()
    assert tab.locator("#steps h3").count() == 5
    tab.locator("#token1").click()  # four columns: two tokens that it sees, two that the mask hides
    rows = {line.split()[0]: line.split()[1:] for line in tab.locator("#steps tr").all_inner_texts()}
    assert [float(one) for one in rows["weights"]] == pytest.approx([*weights[1, :2].tolist(), 0, 0], abs=0.05)
    assert (rows["masked"][:2], rows["masked"][2:]) == (rows["scores"][:2], ["\u2212\u221e"] * 2)
    assert len(rows["context"]) == NUMBERS
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert errors == []
    tab.close()
