"""Tokenizers of Hugging Face folders: the same ids in their order and in ours, and one line about all others."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import harness
from gpt.data.tokenizer import END_OF_TEXT, GPT2_PATTERN, Tokenizer, byte_tokenizer, gpt2_tokenizer, train_bpe
from gpt.interop.vocabulary import read, to_huggingface_tokenizer, to_printable
from gpt.loading import open_model, open_tokenizer

ADDED = {"id": 0, "content": END_OF_TEXT, "special": True, "normalized": False}
ADDED |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
TEXT = "It's 1,234 naïve cafés, don't you think?\n\n\tself.x  =  3 # 世界 🙂\r\nthe theme there, thethethe    \n"


@pytest.fixture(scope="module")
def theirs() -> ByteLevelBPETokenizer:
    """A tokenizer as their library trains it, with the end of text before all other tokens."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([TEXT] * 3, 301, min_frequency=2, special_tokens=[END_OF_TEXT], show_progress=False)
    return trained


@pytest.fixture
def folder(theirs, tmp_path) -> Path:
    """A folder with that tokenizer."""
    theirs.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def change(folder: Path, *place: str, value: object) -> None:
    """Set a value at some place of tokenizer.json."""
    stored = json.loads((folder / "tokenizer.json").read_text())
    inner = stored
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    (folder / "tokenizer.json").write_text(json.dumps(stored))


def refusal(folder: Path) -> str:
    """The one line with which a tokenizer is refused, after its folder."""
    line, start = harness.refusal(read, folder), f"{folder}: its tokenizer cannot be used: "
    assert line.startswith(start)
    return line.removeprefix(start)


def merged_from(ranks: dict[bytes, int], token: bytes) -> list[bytes]:
    """The two tokens that merge into one."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        made = [ranks.get(left + right, len(ranks)) for left, right in pairwise(parts)]
        i = made.index(min(made))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


# --- in their terms ---


def test_every_split_is_needed():
    """A table whose tokens are reached in two ways has the same ids only with both merges."""
    table = {bytes([byte]): byte for byte in range(256)} | {b"bc": 256, b"ab": 257, b"abc": 258}
    text = "abcab abab bcabc"
    tokenizer = Tokenizer("bpe", table, GPT2_PATTERN)
    assert tokenizer.encode(text)[0] == 258
    assert to_huggingface_tokenizer(tokenizer).encode(text).ids == tokenizer.encode(text)


@pytest.mark.parametrize("tokenizer", [train_bpe([TEXT * 3], 307), byte_tokenizer()], ids=["bpe", "byte"])
def test_there_and_back(tmp_path, tokenizer):
    """What is written gives the same ids, and is read as the very same tokenizer with the same ids."""
    written = to_huggingface_tokenizer(tokenizer)
    written.save(str(tmp_path / "tokenizer.json"))
    assert written.encode(TEXT).ids == tokenizer.encode(TEXT)
    assert written.token_to_id(END_OF_TEXT) == tokenizer.end_of_text
    again, order = read(tmp_path)
    assert (again.to_dict(), order) == (tokenizer.to_dict(), list(range(tokenizer.vocab_size)))


@pytest.mark.slow
@pytest.mark.parametrize("published", [False, True])
def test_gpt2(tmp_path, published):
    """GPT-2's own vocabulary is recognised, as we export it and as it is on the hub.

    That file has one merge for each token, and keys as they were before `use_regex`; some people's cuts texts short.
    """
    tokenizer = gpt2_tokenizer()
    to_huggingface_tokenizer(tokenizer).save(str(tmp_path / "tokenizer.json"))
    if published:
        pairs = [merged_from(tokenizer.ranks, token) for token in tokenizer.ranks if len(token) > 1]
        change(tmp_path, "model", "merges", value=[" ".join(map(to_printable, pair)) for pair in pairs])
        change(tmp_path, "model", "ignore_merges", value=False)
        change(tmp_path, "pre_tokenizer", value={"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True})
        cut = {"direction": "Right", "max_length": 50, "strategy": "LongestFirst", "stride": 0}
        change(tmp_path, "truncation", value=cut)
    again, order = read(tmp_path)
    assert (again.name, again.sha256, order) == ("gpt2", tokenizer.sha256, list(range(50257)))


# --- in ours ---


@pytest.mark.parametrize("form", ["tokenizer.json", "transformers", "old"])
def test_their_own(theirs, tmp_path, form):
    """Their ids in another order than ours, from each kind of file: text has the same tokens."""
    if form == "transformers":
        PreTrainedTokenizerFast(tokenizer_object=theirs._tokenizer, eos_token=END_OF_TEXT).save_pretrained(tmp_path)
    else:
        theirs.save(str(tmp_path / "tokenizer.json"))
        if form == "old":  # merges as they were written before tokenizers 0.20
            pairs = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["merges"]
            change(tmp_path, "model", "merges", value=[" ".join(pair) for pair in pairs])
    tokenizer, order = read(tmp_path)
    assert (tokenizer.name, tokenizer.vocab_size, order[-1]) == ("bpe", 301, 0)
    assert [order[token] for token in tokenizer.encode(TEXT)] == theirs.encode(TEXT).ids
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


@torch.no_grad()
def test_rows_of_the_embedding(theirs, folder):
    """The model's embedding follows the ids, so that its logits are theirs, token by token."""
    torch.manual_seed(3)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=301, n_positions=97, n_embd=30, n_layer=2, n_head=3)).eval()
    model.transformer.wte.weight.mul_(20)
    model.save_pretrained(folder)
    ours, tokenizer = open_model(folder)
    _, order = read(folder)
    ids, idx = theirs.encode(TEXT).ids[:97], tokenizer.encode(TEXT)[:97]
    assert ids != idx
    expected = model(torch.tensor([ids])).logits[..., order]
    assert expected.std() > 0.5
    torch.testing.assert_close(ours(torch.tensor([idx])), expected, atol=1e-4, rtol=0.0)
    assert open_tokenizer(folder).sha256 == tokenizer.sha256


@torch.no_grad()
@pytest.mark.parametrize(("added", "rows"), [(["[PAD]"], 302), (["[PAD]", "<s>"], 320), ([], 320)])
def test_rows_beyond_the_tokens(theirs, folder, added, rows):
    """Of added tokens, or to fill the matrix up: they are cut off, for every way to run the model."""
    torch.manual_seed(3)
    more = [{**ADDED, "id": 301 + i, "content": content} for i, content in enumerate(added)]
    change(folder, "added_tokens", value=[ADDED, *more])
    model = GPT2LMHeadModel(GPT2Config(vocab_size=rows, n_positions=97, n_embd=30, n_layer=2, n_head=3)).eval()
    model.transformer.wte.weight[301:] = 100.0  # would be likely, were they there
    model.save_pretrained(folder)
    ours, tokenizer = open_model(folder)
    _, order = read(folder)
    assert ours.config.vocab_size == tokenizer.vocab_size == open_tokenizer(folder).vocab_size == len(order) == 301
    assert ours.token_embedding.weight.equal(model.transformer.wte.weight[order])
    ids, idx = theirs.encode(TEXT).ids[:97], tokenizer.encode(TEXT)[:97]
    torch.testing.assert_close(ours(torch.tensor([idx])), model(torch.tensor([ids])).logits[..., order])
    assert tokenizer.decode(tokenizer.encode("[PAD] is text")) == "[PAD] is text"


@pytest.mark.parametrize(("rows", "fits"), [(50304, True), (51200, True), (50265, False), (52224, False)])
def test_rows_beyond_those_of_gpt2(tmp_path, rows, fits):
    """Without a tokenizer in the folder, only such as fill up the matrix."""
    GPT2LMHeadModel(GPT2Config(vocab_size=rows, n_positions=7, n_embd=6, n_layer=1, n_head=1)).save_pretrained(tmp_path)
    if fits:
        assert open_model(tmp_path)[0].config.vocab_size == 50257
    else:
        line = f"{tmp_path}: its vocab_size is {rows}, and GPT-2's own tokenizer has 50257 tokens"
        assert harness.refusal(open_model, tmp_path) == line


@pytest.mark.parametrize("size", [300, 1326, True, "301"])
def test_does_not_fit_the_embedding(folder, size):
    """At least as many rows as tokens, and not far more, or the line says how many of both."""
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": size}))
    for act in (open_model, open_tokenizer):
        line = harness.refusal(act, folder)
        assert line == f"{folder}: its vocab_size is {size!r}, and its tokenizer has 301 tokens"


CUT = "GPT-2's has no normalizer, and the pre_tokenizer ByteLevel without a space before the text"
TEXTS = "its merges give some texts other tokens than a table of ranks can"


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        (["normalizer"], {"type": "NFC"}, CUT),
        (["pre_tokenizer"], {"type": "Whitespace"}, CUT),
        (["pre_tokenizer"], None, CUT),
        (["pre_tokenizer", "add_prefix_space"], True, CUT),
        (["pre_tokenizer", "use_regex"], False, CUT),
        (["model", "dropout"], 0.1, TEXTS),
        (["added_tokens"], [], "it has 0 added tokens ([]), not <|endoftext|> or one"),
        (["added_tokens"], [{**ADDED, "content": "x"}, {**ADDED, "content": "y"}], "it has 2 added tokens (["),
        (["added_tokens"], [{**ADDED, "content": "a"}], "tokenizer 'bpe': it has no token for byte 97"),
        (["model", "vocab", "q"], 400, "its 301 ids are not 0 to 300, each once"),
        (["model", "vocab", "世"], 301, "its token '世' is not spelled in GPT-2's stand-ins for bytes"),
        (["model", "merges"], [["Ā", "q"]], "Cannot instantiate Tokenizer from buffer: Token `Āq` out of vocabulary"),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, list) and value and isinstance(value[0], str) else "",
)
def test_other_tokenizers(folder, place, value, reason):
    """What a table of ranks with GPT-2's pattern does not express is refused, and the line says what it is."""
    change(folder, *place, value=value)
    assert refusal(folder).startswith(reason)


@pytest.mark.parametrize("levels", [10, 11, 16])
def test_letters_that_are_doubled(folder, levels):
    """A small file cannot hold tokens so long that what is made of a few of them fills the memory."""
    stored = json.loads((folder / "tokenizer.json").read_text())
    tokens, pairs = [to_printable(bytes([byte])) for byte in range(256)], []
    for level in range(levels):
        pairs.append(["a" * 2**level] * 2)
        tokens.append("a" * 2 ** (level + 1))
    stored["model"] |= {"vocab": {token: i for i, token in enumerate(tokens)}, "merges": pairs}
    stored["added_tokens"][0]["id"] = len(tokens)
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    if levels == 10:
        assert read(folder)[0].vocab_size == 267
    else:
        assert refusal(folder) == f"tokenizer 'bpe': it has a token of {2**levels:,} bytes, and the most are 1,024"


def test_other_merges(folder):
    """Merges that never make one of the tokens; that is found by comparing."""
    pairs = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]
    change(folder, "model", "merges", value=pairs[:-1])
    assert refusal(folder) == TEXTS


@pytest.mark.parametrize("content", ["", "[]", "[" * 100_000, "\udcff"])
def test_damaged(folder, content):
    """No JSON, or no object."""
    (folder / "tokenizer.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    assert refusal(folder)


def test_older_form(theirs, tmp_path):
    """A folder without a tokenizer has none; vocab.json is refused, since the tokens would be another vocabulary's."""
    assert read(tmp_path) is None
    theirs.save_model(str(tmp_path))
    hint = "load it with transformers' AutoTokenizer, and save it as tokenizer.json with save_pretrained"
    line = f"{tmp_path}: its tokenizer is in the older form, vocab.json: {hint}"
    assert harness.refusal(read, tmp_path) == line
