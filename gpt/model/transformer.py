"""GPT-2 (Radford et al. 2019): token and position embeddings, pre-norm transformer blocks, a tied output head.

Letters in shapes: B batch, T tokens, S tokens so far (T and those in the cache), C d_model, V vocabulary, L layers,
H heads.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpt.errors import UserError, require_range
from gpt.model.attention import KVCache, MultiHeadAttention
from gpt.model.fast.operations import SkipInit, tied_embedding
from gpt.model.linear import Linear

# The fields that GPT-2 has, with any value; what repeats the model's computation elsewhere knows these alone.
OF_GPT2 = {"vocab_size", "context_length", "d_model", "num_layers", "num_heads", "dropout", "qkv_bias"}


@dataclass
class ModelConfig:
    """The shape of a model except for its vocabulary size, which the tokenizer sets. The defaults are those of mini."""

    context_length: int = 256
    d_model: int = 128
    num_layers: int = 4
    num_heads: int = 4
    dropout: float = 0.0
    qkv_bias: bool = True

    def __post_init__(self) -> None:
        for name in ("context_length", "d_model", "num_layers", "num_heads"):
            require_range(f"model.{name}", getattr(self, name), 1)
        require_range("model.dropout", self.dropout, 0, 1, below=True)
        if self.d_model % self.num_heads != 0:
            raise UserError(
                f"model.d_model={self.d_model} is not divisible by model.num_heads={self.num_heads}: "
                f"try model.d_model={-(-self.d_model // self.num_heads) * self.num_heads}"
            )


@dataclass
class GPTConfig(ModelConfig):
    """Everything needed to build a model: a `ModelConfig` and the vocabulary size."""

    vocab_size: int = 50257

    def require_gpt2(self, what: str) -> None:
        """Raise `UserError` if a field that GPT-2 does not have is not at its default: `what` would ignore it."""
        usual = type(self)()
        for name, value in vars(self).items():
            if name not in OF_GPT2 and value != getattr(usual, name):
                raise UserError(f"model.{name}={value!r} is nothing that GPT-2 has, and all that {what} knows is GPT-2")

    @property
    def num_parameters(self) -> int:
        """The number of trained parameters: embeddings (the tied head counts once), blocks and final norm."""
        C = self.d_model
        per_block = 12 * C**2 + (10 + 3 * self.qkv_bias) * C
        return (self.vocab_size + self.context_length) * C + self.num_layers * per_block + 2 * C


class FeedForward(nn.Module):
    """Two linear maps with GELU (tanh form) between them: C -> 4C -> C."""

    def __init__(self, d_model: int):
        super().__init__()
        self.expand = Linear(d_model, 4 * d_model)
        self.contract = Linear(4 * d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(self.expand(x), approximate="tanh")  # (B, T, 4C)
        return self.contract(inner)  # (B, T, C)


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); maps (B, T, C) to (B, T, C).

    Sums and norms keep the precision of x; attention and feed-forward use that of their linear maps: see
    `Linear.dtype`. For one token after a cache, gpt/model/fast/compiled.py is the fast twin.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        C = config.d_model
        self.norm1 = nn.LayerNorm(C)
        self.attention = MultiHeadAttention(
            C, C, config.context_length, config.dropout, config.num_heads, config.qkv_bias
        )
        self.norm2 = nn.LayerNorm(C)
        self.feed_forward = FeedForward(C)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cache: KVCache | None = None, blocked: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), cache, blocked))
        return x + self.dropout(self.feed_forward(self.norm2(x)))


class GPT(nn.Module):
    """A GPT-2-style language model. Its output head is the transposed token embedding, with no weights of its own."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.position_embedding = nn.Embedding(config.context_length, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.d_model)
        self.output: nn.Module | None = None  # replaces the tied head where sampling packs the weights
        self.checkpointing = False  # keep only each block's input, and compute the rest again in the backward pass
        self.init_weights()

    @classmethod
    def from_state_dict(cls, config: GPTConfig, state_dict: dict[str, Tensor]) -> "GPT":
        """Build an fp32 model around the tensors of a state dict; those already in fp32 are used without copying.

        No initial weights are drawn, which would take a second for GPT-2 124M. `RuntimeError` if the tensors do not
        fit the model.
        """
        with SkipInit():
            model = cls(config)
        model.load_state_dict(state_dict, assign=True)
        return model.float()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw the initial weights as GPT-2 does.

        | weights                                       | distribution                   |
        | embeddings, linear layers                     | N(0, 0.02)                     |
        | linear layers that end in the residual stream | N(0, 0.02 / sqrt(2 num_layers))|
        | biases; gains of the norms                    | 0; 1                           |
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("out_proj.weight", "contract.weight"))
                std = 0.02 / math.sqrt(2 * self.config.num_layers) if into_residual else 0.02
                parameter.normal_(0.0, std)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.fill_(1.0)

    def forward(self, idx: Tensor, caches: list[KVCache] | None = None) -> Tensor:
        """Logits (B, T, V) of the token that follows each of the tokens idx (B, T)."""
        return self.head(self.hidden(idx, caches))

    def hidden(self, idx: Tensor, caches: list[KVCache] | None = None, starts: Tensor | None = None) -> Tensor:
        """The final hidden states (B, T, C) of the tokens idx (B, T), which `head` turns into logits.

        With `caches` (from `init_kv_caches`) idx continues the tokens already seen, and the caches grow by T. `starts`
        (B,) is the amount of padding at the left of each row, counting cached tokens too: nothing attends to padding,
        and positions count from the first real token.
        """
        seen = 0 if caches is None else caches[0].length
        x = self._embed(self.token_embedding(idx), seen, starts)
        blocked = None if starts is None else self._blocked(seen, idx.shape[1], starts)
        return self._transform(x, caches, blocked)

    def features_and_head(self, idx: Tensor, places: int = 1) -> tuple[Tensor, Tensor]:
        """What the training loss takes: the hidden states (B, T, C) of idx (B, T) and the head's weight (V, C).

        Of `places` rows, the first stands at positions 0 to T - 1, the next at T to 2 T - 1, and so on, then again from
        0: so short windows teach all positions.
        """
        embedded, head_weight = tied_embedding(idx, self.token_embedding.weight)  # as in `hidden`, with less memory
        B, T, C = embedded.shape
        x = self._embed(embedded.view(B // places, places * T, C)).view(B, T, C)
        return self._transform(x), head_weight

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of hidden states (..., C)."""
        if self.output is not None:
            return self.output(hidden)
        return F.linear(hidden, self.token_embedding.weight.to(hidden.dtype))

    def set_compute_dtype(self, dtype: torch.dtype) -> "GPT":
        """Make the linear maps of the blocks multiply in `dtype`; return the model itself.

        Weights keep their precision, and so do norms and the residual stream, which cost little and would lose the
        most.
        """
        for module in self.blocks.modules():
            if isinstance(module, Linear):
                module.compute_dtype = dtype
        return self

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the blocks' products."""
        return self.blocks[-1].feed_forward.contract.dtype  # type: ignore[union-attr, return-value]

    def init_kv_caches(self) -> list[KVCache]:
        """Make an empty key-value cache for each layer."""
        return [KVCache(self.config.context_length) for _ in self.blocks]

    @torch.no_grad()
    def attention_maps(self, idx: Tensor) -> Tensor:
        """Every head's attention weights (B, L, H, T, T) on the tokens idx (B, T)."""
        x = self._embed(self.token_embedding(idx))
        maps = []
        for block in self.blocks:
            assert isinstance(block, TransformerBlock)
            maps.append(block.attention.weights(block.norm1(x)))
            x = block(x)
        return torch.stack(maps, dim=1)

    def flops_per_token(self, tokens: int) -> int:
        """Floating-point operations to train on one token of a sequence of `tokens`.

        Six for every weight that multiplies (two forward, four backward), plus 12 C a layer for every token attended
        to, counting the full square of scores: Chowdhery et al. 2022 (PaLM), appendix B.
        """
        matrices = sum(p.numel() for p in self.parameters() if p.dim() == 2) - self.position_embedding.weight.numel()
        return 6 * matrices + 12 * self.config.num_layers * self.config.d_model * tokens

    def _blocked(self, seen: int, T: int, starts: Tensor) -> Tensor:
        """The mask (B, 1, T, S) that blocks later tokens and padding, but never a token itself."""
        causal = self.blocks[0].attention.mask[seen : seen + T, : seen + T]  # type: ignore[index, union-attr]
        columns = torch.arange(seen + T, device=starts.device)  # (S,)
        itself = columns == columns[seen:, None]  # (T, S): padding with nothing to attend to would be nan
        return ((causal | (columns < starts[:, None, None])) & ~itself)[:, None]

    def _embed(self, embedded: Tensor, seen: int = 0, starts: Tensor | None = None) -> Tensor:
        end = seen + embedded.shape[1]
        if end > self.config.context_length:
            limit = self.config.context_length
            raise ValueError(f"{end} tokens do not fit a context of {limit}: pass the last ones only")
        positions = self.position_embedding.weight[seen:end]  # (T, C)
        if starts is not None:
            columns = torch.arange(seen, end, device=starts.device)
            positions = self.position_embedding((columns - starts[:, None]).clamp(min=0))  # (B, T, C)
        return self.dropout(embedded + positions)  # (B, T, C)

    def _transform(self, x: Tensor, caches: list[KVCache] | None = None, blocked: Tensor | None = None) -> Tensor:
        for i, block in enumerate(self.blocks):
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)  # Chen et al. 2016 (arXiv:1604.06174)
            else:
                x = block(x, None if caches is None else caches[i], blocked)
        return self.final_norm(x).to(self.dtype)
