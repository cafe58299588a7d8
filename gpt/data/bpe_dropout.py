"""BPE-dropout: at random, replace a token by the two tokens that it was merged from.

Text that is seen in many epochs then looks different in each, and the model learns how tokens are spelt. In Provilkov
et al. 2020 (arXiv:1910.13267) the encoder skips merges and encodes the whole text again. Here only the last merge of a
token is undone, in the sequences of a step, where it costs next to nothing.

Letters in shapes: B sequences, T tokens in a sequence, V vocabulary.
"""

import itertools

import torch
from torch import Tensor

from gpt.data.tokenizer import Tokenizer

NO_MERGE = -1  # in the merge table, for tokens that were not merged


def merge_table(tokenizer: Tokenizer) -> Tensor:
    """Return the two ids that each token was merged from, (V, 2); `NO_MERGE` for single bytes and end-of-text."""
    ranks = tokenizer.ranks
    table = torch.full((tokenizer.vocab_size, 2), NO_MERGE)
    for token, rank in ranks.items():
        parts = _undo_last_merge(token, rank, ranks)
        if len(parts) == 2:
            table[rank] = torch.tensor([ranks[part] for part in parts])
    return table


def _undo_last_merge(token: bytes, rank: int, ranks: dict[bytes, int]) -> list[bytes]:
    """Merge the bytes of a token as the encoder does, while the result has a lower rank than the token."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pair_ranks = [ranks.get(left + right, rank) for left, right in itertools.pairwise(parts)]
        lowest = min(pair_ranks)
        if lowest == rank:
            break
        i = pair_ranks.index(lowest)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def apply_bpe_dropout(
    idx: Tensor, targets: Tensor, merges: Tensor, probability: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, each (B, T), in which random tokens are replaced by the two they were merged from.

    A sequence starts at the same place of the text and ends earlier. All tensors and the generator share a device.

    Args:
        idx: The inputs, (B, T).
        targets: The inputs' next tokens, (B, T).
        merges: The result of `merge_table`, (V, 2).
        probability: The probability that a merged token is replaced.
        generator: Draws the random numbers.
    """
    block = torch.cat([idx, targets[:, -1:]], dim=1)  # (B, T + 1)
    first, second = merges[block].unbind(-1)
    is_drawn = torch.rand(block.shape, generator=generator, device=block.device) < probability
    is_split = is_drawn & (first != NO_MERGE)
    # The new position of each token, or of the first of its two parts: it moves right by one for each split before it.
    position = torch.arange(block.shape[1], device=block.device) + is_split.cumsum(1) - is_split.long()
    longer = block.new_zeros(len(block), 2 * block.shape[1])
    longer.scatter_(1, position + is_split, torch.where(is_split, second, block))
    longer.scatter_(1, position, torch.where(is_split, first, block))
    return longer[:, : idx.shape[1]].contiguous(), longer[:, 1 : idx.shape[1] + 1].contiguous()
