"""Tokenizers of Hugging Face folders give the same ids, in their order and in ours. Others are refused in one line."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import harness
from gpt.data.tokenizer import END_OF_TEXT, GPT2_PATTERN, Tokenizer, byte_tokenizer, gpt2_tokenizer, train_bpe
from gpt.interop.vocabulary import read_huggingface_tokenizer, to_huggingface_tokenizer, to_printable
from gpt.loading import open_model, open_tokenizer
from gpt.model.transformer import GPTConfig
from models import gpt2_twin

ADDED = {"id": 0, "content": END_OF_TEXT, "special": True, "normalized": False}
ADDED |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
TEXT = "It's 1,234 naïve cafés, don't you think?\n\n\tself.x  =  3 # 世界 🙂\r\nthe theme there, thethethe    \n"


@pytest.fixture(scope="module")
def trained() -> ByteLevelBPETokenizer:
    """A tokenizer that the library trains. Its end of text comes before all other tokens."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([TEXT] * 3, 301, min_frequency=2, special_tokens=[END_OF_TEXT], show_progress=False)
    return tokenizer


@pytest.fixture
def folder(trained, tmp_path) -> Path:
    """A folder with that tokenizer."""
    trained.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def read_json(folder: Path) -> dict:
    return json.loads((folder / "tokenizer.json").read_text())


def change(folder: Path, *keys: str, value: object) -> None:
    """Set a nested value of tokenizer.json."""
    stored = read_json(folder)
    inner = stored
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    (folder / "tokenizer.json").write_text(json.dumps(stored))


def refusal(folder: Path) -> str:
    """Return the line with which a tokenizer is refused, without the folder at its beginning."""
    line = harness.refusal(read_huggingface_tokenizer, folder)
    start = f"{folder}: its tokenizer cannot be used: "
    assert line.startswith(start)
    return line.removeprefix(start)


def find_last_merge(ranks: dict[bytes, int], token: bytes) -> list[bytes]:
    """Return the two tokens that merge into a token."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        merged_ranks = [ranks.get(left + right, len(ranks)) for left, right in pairwise(parts)]
        i = merged_ranks.index(min(merged_ranks))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def save_gpt2(folder: Path, vocab_size: int) -> GPT2LMHeadModel:
    """Save a model whose rows beyond the tokens would be likely if they could be sampled."""
    model = gpt2_twin(GPTConfig(97, 30, 2, 3, vocab_size=vocab_size))
    with torch.no_grad():
        model.transformer.wte.weight[301:] = 100.0
    model.save_pretrained(folder)
    return model


# --- from our tokenizer to the library's ---


def test_every_split_of_a_token_becomes_a_merge():
    """The tokenizer reaches the token abc in two ways, and needs both merges for equal ids."""
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"bc": 256, b"ab": 257, b"abc": 258}
    tokenizer = Tokenizer("bpe", ranks, GPT2_PATTERN)
    text = "abcab abab bcabc"
    assert tokenizer.encode(text)[0] == 258
    assert to_huggingface_tokenizer(tokenizer).encode(text).ids == tokenizer.encode(text)


@pytest.mark.parametrize("tokenizer", [train_bpe([TEXT * 3], 307), byte_tokenizer()], ids=["bpe", "byte"])
def test_a_tokenizer_comes_back_as_it_was(tmp_path, tokenizer):
    written = to_huggingface_tokenizer(tokenizer)
    written.save(str(tmp_path / "tokenizer.json"))
    assert written.encode(TEXT).ids == tokenizer.encode(TEXT)
    assert written.token_to_id(END_OF_TEXT) == tokenizer.end_of_text
    read, order = read_huggingface_tokenizer(tmp_path)
    assert (read.to_dict(), order) == (tokenizer.to_dict(), list(range(tokenizer.vocab_size)))


@pytest.mark.slow
@pytest.mark.parametrize("is_published_form", [False, True])
def test_gpt2s_own_vocabulary_is_recognised(tmp_path, is_published_form):
    """The file on the hub has one merge for each token and no key `use_regex`. Some copies truncate texts."""
    tokenizer = gpt2_tokenizer()
    to_huggingface_tokenizer(tokenizer).save(str(tmp_path / "tokenizer.json"))
    if is_published_form:
        pairs = [find_last_merge(tokenizer.ranks, token) for token in tokenizer.ranks if len(token) > 1]
        change(tmp_path, "model", "merges", value=[" ".join(map(to_printable, pair)) for pair in pairs])
        change(tmp_path, "model", "ignore_merges", value=False)
        change(tmp_path, "pre_tokenizer", value={"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True})
        truncation = {"direction": "Right", "max_length": 50, "strategy": "LongestFirst", "stride": 0}
        change(tmp_path, "truncation", value=truncation)
    read, order = read_huggingface_tokenizer(tmp_path)
    assert (read.name, read.sha256, order) == ("gpt2", tokenizer.sha256, list(range(50257)))


# --- from the library's tokenizer to ours ---


@pytest.mark.parametrize("form", ["tokenizer.json", "transformers", "old"])
def test_ids_in_another_order_give_the_same_tokens(trained, tmp_path, form):
    if form == "transformers":
        PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token=END_OF_TEXT).save_pretrained(tmp_path)
    else:
        trained.save(str(tmp_path / "tokenizer.json"))
    if form == "old":  # the merges of tokenizers before 0.20
        change(tmp_path, "model", "merges", value=[" ".join(pair) for pair in read_json(tmp_path)["model"]["merges"]])
    tokenizer, order = read_huggingface_tokenizer(tmp_path)
    assert (tokenizer.name, tokenizer.vocab_size, order[-1]) == ("bpe", 301, 0)
    assert [order[token] for token in tokenizer.encode(TEXT)] == trained.encode(TEXT).ids
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


@torch.no_grad()
@pytest.mark.parametrize(("added", "num_rows"), [([], 301), (["[PAD]"], 302), (["[PAD]", "<s>"], 320), ([], 320)])
def test_the_embedding_follows_the_ids(trained, folder, added, num_rows):
    """Logits are equal token by token. Rows for added tokens and for padding are cut off."""
    tokens = [{**ADDED, "id": 301 + i, "content": content} for i, content in enumerate(added)]
    change(folder, "added_tokens", value=[ADDED, *tokens])
    gpt2 = save_gpt2(folder, num_rows)
    model, tokenizer = open_model(folder)
    order = read_huggingface_tokenizer(folder)[1]
    assert model.config.vocab_size == tokenizer.vocab_size == len(order) == 301
    assert open_tokenizer(folder).sha256 == tokenizer.sha256
    gpt2_ids, ids = trained.encode(TEXT).ids[:97], tokenizer.encode(TEXT)[:97]
    assert gpt2_ids != ids
    expected = gpt2(torch.tensor([gpt2_ids])).logits[..., order]
    assert expected.std() > 0.5
    torch.testing.assert_close(model(torch.tensor([ids])), expected, atol=1e-4, rtol=0.0)
    assert tokenizer.decode(tokenizer.encode("[PAD] is text")) == "[PAD] is text"


@pytest.mark.parametrize("num_rows", [50304, 51200])
def test_gpt2s_embedding_may_be_padded(tmp_path, num_rows):
    """Without a tokenizer in the folder, the number of rows must be a multiple of 64."""
    config = GPT2Config(vocab_size=num_rows, n_positions=7, n_embd=6, n_layer=1, n_head=1)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    assert open_model(tmp_path)[0].config.vocab_size == 50257


OWN, GPT2S = "its tokenizer has 301 tokens", "GPT-2's own tokenizer has 50257 tokens"


@pytest.mark.parametrize(
    ("has_tokenizer", "config", "reason"),
    [
        (True, {"vocab_size": 300}, f"vocab_size is 300, and {OWN}"),
        (True, {"vocab_size": 1326}, f"vocab_size is 1326, and {OWN}"),
        (True, {"vocab_size": "301"}, f"vocab_size is '301', and {OWN}"),
        (False, {"vocab_size": 50265}, f"vocab_size is 50265, and {GPT2S}"),
        (False, {"vocab_size": 52224}, f"vocab_size is 52224, and {GPT2S}"),
        (False, {}, f"vocab_size is None, and {GPT2S}"),
        (False, {"model_type": "llama"}, "model_type is 'llama', and only 'gpt2' is supported"),
    ],
)
def test_an_embedding_of_another_size_is_refused(trained, tmp_path, has_tokenizer, config, reason):
    """It has fewer rows than the tokenizer has tokens, or many more. The weights are not needed to see that."""
    if has_tokenizer:
        trained.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"} | config))
    for open_function in (open_model, open_tokenizer):
        assert harness.refusal(open_function, tmp_path) == f"{tmp_path}: its {reason}"


SPLITTER = "GPT-2's has no normalizer, and the pre_tokenizer ByteLevel without a space before the text"
MERGES = "its merges give some texts other tokens than a table of ranks can"


@pytest.mark.parametrize(
    ("keys", "value", "reason"),
    [
        (["normalizer"], {"type": "NFC"}, SPLITTER),
        (["pre_tokenizer"], {"type": "Whitespace"}, SPLITTER),
        (["pre_tokenizer", "add_prefix_space"], True, SPLITTER),
        (["pre_tokenizer", "use_regex"], False, SPLITTER),
        (["model", "dropout"], 0.1, MERGES),
        (["added_tokens"], [], "it has 0 added tokens ([]), not <|endoftext|> or one"),
        (["added_tokens"], [{**ADDED, "content": "x"}, {**ADDED, "content": "y"}], "it has 2 added tokens (["),
        (["added_tokens"], [{**ADDED, "content": "a"}], "tokenizer 'bpe': it has no token for byte 97"),
        (["model", "vocab", "q"], 400, "its 301 ids are not 0 to 300, each once"),
        (["model", "vocab", "世"], 301, "its token '世' is not spelled in GPT-2's 256 characters for bytes"),
        (["model", "merges"], [["Ā", "q"]], "Cannot instantiate Tokenizer from buffer: Token `Āq` out of vocabulary"),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, list) and value and isinstance(value[0], str) else "",
)
def test_tokenizers_that_ranks_cannot_express_are_refused(folder, keys, value, reason):
    change(folder, *keys, value=value)
    assert refusal(folder).startswith(reason)


def test_a_missing_merge_is_refused(folder):
    """Without it, text never becomes one of the tokens. Comparing texts shows that."""
    change(folder, "model", "merges", value=read_json(folder)["model"]["merges"][:-1])
    assert refusal(folder) == MERGES


@pytest.mark.promise("security.md#1,024 bytes")
@pytest.mark.parametrize("levels", [10, 11, 16])
def test_tokens_of_doubled_letters_are_refused(folder, levels):
    """A small file cannot hold tokens so long that a text of a few of them fills the memory."""
    stored = read_json(folder)
    tokens = [to_printable(bytes([byte])) for byte in range(256)]
    tokens += ["a" * 2 ** (level + 1) for level in range(levels)]
    merges = [["a" * 2**level] * 2 for level in range(levels)]
    stored["model"] |= {"vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges}
    stored["added_tokens"][0]["id"] = len(tokens)
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    if levels == 10:
        assert read_huggingface_tokenizer(folder)[0].vocab_size == 267
    else:
        assert refusal(folder) == f"tokenizer 'bpe': it has a token of {2**levels:,} bytes, and the most are 1,024"


@pytest.mark.parametrize("content", ["[" * 100_000, "\udcff"])
def test_a_damaged_file_is_refused(folder, content):
    (folder / "tokenizer.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    assert refusal(folder)


def test_a_tokenizer_in_the_older_form_is_refused(trained, tmp_path):
    """Without vocab.json, a folder has no tokenizer."""
    assert read_huggingface_tokenizer(tmp_path) is None
    trained.save_model(str(tmp_path))
    line = harness.refusal(read_huggingface_tokenizer, tmp_path)
    assert line.startswith(f"{tmp_path}: its tokenizer is in the older form, vocab.json: ")
    assert "save it as tokenizer.json with save_pretrained" in line
