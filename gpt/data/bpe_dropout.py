"""BPE-dropout: now and then a token is shown as the two that it was merged from.

So a text that is seen in many epochs looks different in each, and how tokens are spelt is learnt with it. In Provilkov
et al. 2020 (arXiv:1910.13267) the encoder leaves out merges, and the whole text is encoded anew; here only the last
merge of a token is undone, in the windows of a step, where it costs next to nothing.

Letters in shapes: B windows, T context length, V vocabulary.
"""

import itertools

import torch
from torch import Tensor

from gpt.data.tokenizer import Tokenizer

NO_MERGE = -1  # stands for the parts of a token that has none


def merge_table(tokenizer: Tokenizer) -> Tensor:
    """Return the two ids that each token was merged from, (V, 2); `NO_MERGE` for single bytes and end-of-text."""
    ranks, parts = tokenizer.ranks, torch.full((tokenizer.vocab_size, 2), NO_MERGE)
    for token, rank in ranks.items():
        if len(pair := _before_last_merge(token, rank, ranks)) == 2:
            parts[rank] = torch.tensor([ranks[part] for part in pair])
    return parts


def _before_last_merge(token: bytes, rank: int, ranks: dict[bytes, int]) -> list[bytes]:
    """Join the bytes of a token as its encoding does, as long as that makes tokens that came before it."""
    chunks = [token[i : i + 1] for i in range(len(token))]
    while len(chunks) > 2:
        joined = [ranks.get(left + right, rank) for left, right in itertools.pairwise(chunks)]
        if (least := min(joined)) == rank:
            break
        i = joined.index(least)
        chunks[i : i + 2] = [chunks[i] + chunks[i + 1]]
    return chunks


def apply_bpe_dropout(
    idx: Tensor, targets: Tensor, parts: Tensor, probability: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return sequences, inputs and targets (B, T), in which tokens that have `parts` (V, 2) were split at random.

    A sequence then begins where it did and ends earlier. All tensors and the generator are on one device.
    """
    block = torch.cat([idx, targets[:, -1:]], dim=1)  # (B, T + 1)
    first, second = parts[block].unbind(-1)
    drawn = torch.rand(block.shape, generator=generator, device=block.device) < probability
    is_split = drawn & (first != NO_MERGE)
    place = torch.arange(block.shape[1], device=block.device) + is_split.cumsum(1) - is_split.long()  # of its first id
    longer = block.new_zeros(len(block), 2 * block.shape[1])
    longer.scatter_(1, place + is_split, torch.where(is_split, second, block))
    longer.scatter_(1, place, torch.where(is_split, first, block))
    return longer[:, : idx.shape[1]].contiguous(), longer[:, 1 : idx.shape[1] + 1].contiguous()
