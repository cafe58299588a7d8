"""Tokens that are shown as the two they were merged from: which two, how often, and what a window then holds."""

import pytest
import torch
from torch import Tensor

from gpt.data.bpe_dropout import NO_MERGE, apply_bpe_dropout, merge_table
from gpt.data.tokenizer import Tokenizer, byte_tokenizer, gpt2_tokenizer, train_bpe

TEXT = "It was the best of times, it was the worst of times; it was the age of wisdom, the age of foolishness. " * 20


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe([TEXT], 400)


def windows_of(tokenizer: Tokenizer, count: int = 4, length: int = 33) -> Tensor:
    return torch.tensor(tokenizer.encode(TEXT))[: count * length].view(count, length)


def split(block: Tensor, parts: Tensor, chance: float, seed: int = 1) -> tuple[Tensor, Tensor]:
    return apply_bpe_dropout(block[:, :-1], block[:, 1:], parts, chance, torch.Generator().manual_seed(seed))


def test_parts_spell_their_token_and_came_before_it(tokenizer):
    """Each token but bytes and end-of-text has two parts. The encoding joins them last."""
    parts = merge_table(tokenizer)
    assert (parts[:256] == NO_MERGE).all() and (parts[tokenizer.end_of_text] == NO_MERGE).all()
    for token, rank in list(tokenizer.ranks.items())[256:]:
        assert tokenizer.decode_bytes(parts[rank].tolist()) == token
        assert parts[rank].max() < rank
        before = Tokenizer("bpe", {t: r for t, r in tokenizer.ranks.items() if r < rank}, tokenizer.pattern)
        assert before.encode(token.decode()) == parts[rank].tolist()


def test_gpt2s_tokens_have_parts():
    """All 50,000 merges of GPT-2 can be undone, and plain bytes have none."""
    tokenizer = gpt2_tokenizer()
    parts = merge_table(tokenizer)
    assert (parts[:, 0] != NO_MERGE).sum() == 50_000
    (hello,) = tokenizer.encode(" hello")
    assert tokenizer.decode(parts[hello].tolist()) == " hello"
    assert (merge_table(byte_tokenizer()) == NO_MERGE).all()


@pytest.mark.parametrize("chance", [0.1, 0.5, 1.0])
def test_windows_are_the_same_text_in_smaller_pieces(tokenizer, chance):
    """A window spells the beginning of its text, and its targets are the tokens that follow its inputs."""
    block, parts = windows_of(tokenizer), merge_table(tokenizer)
    idx, targets = split(block, parts, chance)
    assert idx.shape == targets.shape == (4, 32) and torch.equal(idx[:, 1:], targets[:, :-1])
    for before, inputs, last in zip(block, idx, targets[:, -1:], strict=True):
        text = tokenizer.decode_bytes(torch.cat([inputs, last]).tolist())
        assert tokenizer.decode_bytes(before.tolist()).startswith(text) and text
    assert len({tuple(row.tolist()) for row in idx} & {tuple(row.tolist()) for row in block[:, :-1]}) == 0


def test_the_chance_is_that_of_each_token(tokenizer):
    """The fraction of windows that begin with a split token is the probability."""
    parts = merge_table(tokenizer)
    token = tokenizer.end_of_text - 1
    block = torch.full((4000, 2), token)
    idx, targets = split(block, parts, 0.3)
    was_split = idx[:, 0] == parts[token, 0]
    assert 0.27 < was_split.float().mean() < 0.33
    assert (targets[was_split] == parts[token, 1]).all()
    assert not torch.equal(idx, split(block, parts, 0.3, seed=2)[0]) and torch.equal(idx, split(block, parts, 0.3)[0])


def test_without_a_chance_nothing_changes(tokenizer):
    block = windows_of(tokenizer)
    idx, targets = split(block, merge_table(tokenizer), 0.0)
    assert torch.equal(idx, block[:, :-1]) and torch.equal(targets, block[:, 1:])
