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

from gpt.data.tokenizer import byte_tokenizer
from gpt.model.transformer import GPT, GPTConfig
from gpt.sampling.generation import SamplingParams, filter_logits, generate
from gpt.sampling.insight import NUMBERS, insight_page
from gpt.sampling.packed import pack_weights
from harness import import_or_skip

PROMPT = "a</script><b>\n"
SAMPLING = SamplingParams(temperature=0.7, top_p=0.6, repetition_penalty=1.3)
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


def page_of(model: GPT, ids: list[int], given: int, sampling: SamplingParams = SAMPLING, facts: dict = FACTS) -> str:
    return "".join(insight_page(model, byte_tokenizer(), ids[:given], ids[given:], sampling, facts))


@pytest.fixture(scope="module")
def page(model, ids) -> str:
    return page_of(model, ids, len(PROMPT))


def data_of(page: str) -> dict:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(found)


def projections(page: str, layer: int, heads: int, T: int, width: int) -> list[torch.Tensor]:
    """What a page holds: queries and keys, (H, T, D) each, and the first numbers of values, of what each head adds, and
    of the residual stream before: (H, T, NUMBERS) twice, and (1, T, NUMBERS).
    """
    (found,) = re.findall(rf'id="layer{layer}">(.*?)</script>', page)
    halves = np.frombuffer(zlib.decompress(base64.b64decode(found)), np.uint8).reshape(2, -1)
    numbers = torch.from_numpy(((halves[1].astype(np.uint32) << 24) | (halves[0].astype(np.uint32) << 16)).view("f4"))
    first = min(NUMBERS, width)
    parts = numbers.split([heads * T * size for size in (width, width, first, first)] + [T * first])
    return [part.view(-1, T, size) for part, size in zip(parts, (width, width, first, first, first), strict=True)]


def test_expectations(model, ids, page):
    """Surprise, probabilities and what the filters left are those of the model."""
    data, logits = data_of(page), model(torch.tensor([ids]))[0]
    assert [data[key] for key in ("tokens", "given", "heads", "width", "numbers")] == [ids, len(PROMPT), H, D, NUMBERS]
    assert data["expected"][0] == {"bits": None, "rank": 0, "likeliest": []}
    for i in range(1, len(ids)):
        p = logits[i - 1].softmax(-1)
        shown = data["expected"][i]
        assert shown["rank"] == p.argsort(descending=True).tolist().index(ids[i]) + 1
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
    assert (len(layers), len(layers[0]), len(layers[0][0])) == (L + 1, len(ids) - 1, 3)
    x = model.token_embedding.weight[ids[:-1]] + model.position_embedding.weight[: len(ids) - 1]
    for layer, logits in ((0, model.head(model.final_norm(x))), (L, model(torch.tensor([ids[:-1]]))[0])):
        best = logits.softmax(-1).topk(3)
        assert [[i for i, _ in row] for row in layers[layer]] == best.indices.tolist()
        assert torch.tensor([[p for _, p in row] for row in layers[layer]]).allclose(best.values, atol=1e-4)


def test_attention(model, ids, page):
    """Its queries and keys give the attention weights of every head."""
    ids = ids[:-1]  # the model has not seen the last one
    maps = model.attention_maps(torch.tensor([ids]))[0]
    T = len(ids)
    for layer in range(L):
        queries, keys, *_ = projections(page, layer, H, T, D)
        scores = (queries @ keys.transpose(1, 2) / math.sqrt(D)).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
        torch.testing.assert_close(scores.softmax(-1), maps[layer], atol=5e-2, rtol=0)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_what_heads_add(ids, precision):
    """The parts of all heads and the bias are what the layer's attention adds to the residual stream."""
    torch.manual_seed(5)
    model = GPT(GPTConfig(vocab_size=257, context_length=29, d_model=H * 8, num_layers=L, num_heads=H)).eval()
    x = model._embed(model.token_embedding(torch.tensor([ids[:-1]])))
    expected = []
    for block in model.blocks:
        torch.nn.init.normal_(block.attention.out_proj.bias)
        expected.append((x[0], block.attention(block.norm1(x))[0]))
        x = block(x)
    page = page_of(model if precision == "fp32" else pack_weights(model, precision), ids, 3)
    for layer, (before, added) in enumerate(expected):
        *_, parts, stored = projections(page, layer, H, len(ids) - 1, 8)
        together = parts.sum(0) + torch.tensor(data_of(page)["biases"][layer])
        torch.testing.assert_close(together, added[:, :NUMBERS], atol=0.05, rtol=0.02)
        torch.testing.assert_close(stored[0], before[:, :NUMBERS], atol=0.05, rtol=0.02)


def test_bf16_is_stored_exactly(ids):
    """A model that computes in bf16 loses nothing, and its numbers are found again bit for bit."""
    torch.manual_seed(5)
    model = GPT(GPTConfig(vocab_size=257, context_length=29, d_model=H * D, num_layers=1, num_heads=H))
    model.set_compute_dtype(torch.bfloat16)
    page, ids = page_of(model, ids, 3), ids[:-1]
    x = model.token_embedding.weight[ids] + model.position_embedding.weight[: len(ids)]
    expected = model.blocks[0].attention._project(model.blocks[0].norm1(x)[None])
    for stored, vectors in zip(projections(page, 0, H, len(ids), D)[:3], expected, strict=True):
        assert vectors.dtype == torch.bfloat16
        assert stored.equal(vectors[0, ..., : stored.shape[-1]].float())


@pytest.mark.parametrize(("given", "new"), [(8, 21), (8, 22), (8, 53), (29, 7), (37, 7)])
def test_numbers_are_those_of_the_sampling(model, given, new):
    """Whatever the lengths, what is shown was the model's expectation when it drew the token, not a later one."""
    ids = [int(i) for i in np.random.default_rng(3).integers(32, 127, given)]
    drawn: list[torch.Tensor] = []
    tokens = generate(
        model, torch.tensor([ids[-29:]]), new, SAMPLING, torch.Generator().manual_seed(3), on_logits=drawn.append
    )
    written = [int(token) for token in tokens]
    data = data_of(page_of(model, ids + written, given))
    prompt = min(given, 29)
    assert (data["tokens"], data["given"]) == ([*ids[-29:], *written][:30], prompt)
    assert len(data["tokens"]) - prompt + data["omitted"] == new
    for i, token in enumerate(data["tokens"][prompt:]):
        bits = -drawn[i][0].log_softmax(-1)[token].item() / math.log(2)
        assert data["expected"][prompt + i]["bits"] == pytest.approx(bits, abs=1e-2)


def test_greedy(model):
    """Where the likeliest token is taken, no filter has a part in it."""
    data = data_of(page_of(model, list(range(40, 49)), 8, SamplingParams(temperature=0)))
    assert {len(one) for one in data["expected"][8]["likeliest"]} == {2}


def test_self_contained(page):
    """Nothing is loaded from elsewhere, and no text can become part of the page's code."""
    assert not re.search(r"https?:|@import|url\(|src=|href=|fetch\(", page)
    assert page.count("</script>") == page.count("<script") == 2 + L
    assert not re.search(r"/\* (style|script) \*/|<!--", page)
    assert data_of(page)["facts"] == FACTS


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
    tab.get_by_role("radio", name="layer 1, head 1").click()
    tab.get_by_text("How head 1 of layer 1 looked back from").wait_for()  # it was unpacked
    for key, head in (
        ("End", "3 of layer 2"),
        ("Home", "1 of layer 1"),
        ("ArrowDown", "1 of layer 2"),
        ("ArrowRight", "2"),
    ):
        tab.keyboard.press(key)
        tab.get_by_text(f"How head {head}").wait_for()
    shades = tab.eval_on_selector_all(
        "#heads canvas",
        "all => all.map(one => [...one.getContext('2d').getImageData(0, 0, one.width, one.height).data])",
    )
    maps = model.attention_maps(torch.tensor([ids[:-1]]))[0]
    for head, shown in zip(maps.flatten(0, 1), shades, strict=True):
        opacity = torch.tensor(shown).view(*head.shape, 4)[..., 3]
        torch.testing.assert_close(opacity.float(), 255 * head.sqrt(), atol=8, rtol=0)
    tokens = torch.tensor(ids[:-1])
    earlier = (tokens[:, None] == tokens).tril(-1)
    for head, hint in zip(maps.flatten(0, 1), tab.locator("#heads button").all_inner_texts(), strict=True):
        places = {"before": head.diagonal(-1)[1:], "first": head[2:, 0], "itself": head.diagonal()[2:]}
        places["same"] = (head * earlier)[2:].sum(1)
        name, share = max(((name, float(of.mean())) for name, of in places.items()), key=lambda one: one[1])
        assert abs(share - 0.2) < 0.02 or hint.split()[:1] == ([name] if share > 0.2 else [])
    weights = model.attention_maps(torch.tensor([ids]))[0, 1, 1]  # of the position before each token that is chosen
    strengths = lambda: tab.eval_on_selector_all(  # noqa: E731
        ".token", "all => all.map(span => Number(span.style.getPropertyValue('--strength')))"
    )
    assert strengths() == pytest.approx((0.85 * weights[-2] / weights[-2].max()).tolist(), abs=0.05)
    tab.locator("#token6").hover()
    assert strengths() == pytest.approx((0.85 * weights[5] / weights[5].max()).tolist(), abs=0.05)
    assert "How head 2 of layer 2 looked back from" in tab.locator("#head-how").inner_text()
    assert tab.locator("#steps h3").count() == 6
    tab.locator("#token2").click()  # four columns: two tokens that the one before it sees, two that the mask hides
    rows = {line.split()[0]: line.split()[1:] for line in tab.locator("#steps tr").all_inner_texts()}
    assert [float(one) for one in rows["weights"]] == pytest.approx([*weights[1, :2].tolist(), 0, 0], abs=0.05)
    assert (rows["masked"][:2], rows["masked"][2:]) == (rows["scores"][:2], ["\u2212\u221e"] * 2)
    assert len(rows["context"]) == NUMBERS
    before, added, after = ([float(one) for one in rows[name][-NUMBERS:]] for name in ("before", "all", "after"))
    assert after == pytest.approx([a + b for a, b in zip(before, added, strict=True)], abs=0.02)
    tab.locator("#token0").click()
    assert tab.locator("#head-how").inner_text() == "Nothing comes before the first token."
    assert tab.locator("#omitted").inner_text() == ""
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert errors == []
    tab.close()
