"""GPT-2 (Radford et al. 2019): token and position embeddings, pre-norm transformer blocks, a tied output head.

Letters in shapes: B batch, T tokens, C d_model, V vocabulary, L layers, H heads.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from gpt.model.attention import KVCache, MultiHeadAttention
from gpt.model.linear import Linear


@dataclass
class ModelConfig:
    """The shape of a model, all but its vocabulary, which the tokenizer decides. The defaults are GPT-2 124M."""

    context_length: int = 1024
    d_model: int = 768
    num_layers: int = 12
    num_heads: int = 12
    dropout: float = 0.0
    qkv_bias: bool = True

    def __post_init__(self) -> None:
        for name in ("context_length", "d_model", "num_layers", "num_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}={getattr(self, name)} is out of range: it must be at least 1")
        if self.d_model % self.num_heads != 0:
            raise ValueError(
                f"model.d_model={self.d_model} is not divisible by model.num_heads={self.num_heads}: "
                f"try d_model={math.ceil(self.d_model / self.num_heads) * self.num_heads}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"model.dropout={self.dropout} is out of range: it must be at least 0 and below 1")


@dataclass
class GPTConfig(ModelConfig):
    """A `ModelConfig` with its vocabulary: all that is needed to build a model."""

    vocab_size: int = 50257

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocab_size < 1:
            raise ValueError(f"vocab_size={self.vocab_size} is out of range: it must be at least 1")


class FeedForward(nn.Module):
    """Two linear maps, C -> 4C -> C, with the tanh form of GELU between them."""

    def __init__(self, d_model: int):
        super().__init__()
        self.expand = Linear(d_model, 4 * d_model)
        self.contract = Linear(4 * d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.contract(F.gelu(self.expand(x), approximate="tanh"))


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); maps (B, T, C) to (B, T, C).

    The sums and norms are in the precision of x, the two maps in that of their linear maps: see `Linear.dtype`.
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
    """A GPT-2-style language model. Its output head is the transposed token embedding and has no weights of its own."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.position_embedding = nn.Embedding(config.context_length, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.d_model)
        self.output: nn.Module | None = None  # in place of the tied head, for sampling: see inference.py
        self.checkpointing = False  # keep only what goes into each block, and compute it again for the backward pass
        self.init_weights()

    @classmethod
    def from_state_dict(cls, config: GPTConfig, state_dict: dict[str, Tensor]) -> "GPT":
        """A model in fp32 whose weights are the very tensors of a state dict, where these are in fp32, and not copies.

        None are drawn first, which would take a second for GPT-2 124M. `RuntimeError` where they do not fit the model.
        """
        with _Undrawn():
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
        """Logits (B, T, V) of the token after each of the tokens idx (B, T)."""
        return self.head(self.hidden(idx, caches))

    def hidden(self, idx: Tensor, caches: list[KVCache] | None = None, starts: Tensor | None = None) -> Tensor:
        """The final hidden states (B, T, C) of the tokens idx (B, T), which `head` turns into logits.

        With `caches` (from `new_caches`) idx continues the tokens already seen, and the caches grow by T. `starts` (B,)
        is how many tokens at the left of each row, those seen included, are only there to fill it: nothing attends to
        them, and positions count from the first that is not.
        """
        seen = 0 if caches is None else caches[0].length
        x = self._embed(self.token_embedding(idx), seen, starts)
        blocked = None if starts is None else self._blocked(seen, idx.shape[1], starts)
        return self._transform(x, caches, blocked)

    def hidden_and_head(self, idx: Tensor) -> tuple[Tensor, Tensor]:
        """`hidden` of the tokens idx, and the weight (V, C) of the head: what `next_token_loss` needs to train.

        The weight is that of the token embedding. On a CPU the gradients of its two uses are added up in the memory of
        the head's, where autograd alone would make two tensors of that size.
        """
        embedded, head_weight = _TiedLookup.apply(idx, self.token_embedding.weight)
        return self._transform(self._embed(embedded)), head_weight

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of hidden states (..., C)."""
        if self.output is not None:
            return self.output(hidden)
        return F.linear(hidden, self.token_embedding.weight.to(hidden.dtype))

    def compute_in(self, dtype: torch.dtype) -> "GPT":
        """Have the linear maps of the blocks multiply in `dtype`; returns the model itself.

        All weights stay as they are, and so do norms and the residual stream, which cost little and lose the most.
        """
        for module in self.blocks.modules():
            if isinstance(module, Linear):
                module.compute_dtype = dtype
        return self

    @property
    def dtype(self) -> torch.dtype:
        """The precision in which the blocks multiply."""
        return self.blocks[-1].feed_forward.contract.dtype  # type: ignore[union-attr, return-value]

    def new_caches(self) -> list[KVCache]:
        """An empty key-value cache for each layer."""
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

    def num_parameters(self) -> int:
        """How many numbers training adjusts; the tied head counts once, as the token embedding."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, tokens: int) -> int:
        """Floating-point operations to train on one token of a sequence of `tokens`.

        Six for every weight that multiplies (two forward, four backward), and 12 C a layer for each token attended
        to, counting the full square of scores: Chowdhery et al. 2022 (PaLM), appendix B.
        """
        matrices = sum(p.numel() for p in self.parameters() if p.dim() == 2) - self.position_embedding.weight.numel()
        return 6 * matrices + 12 * self.config.num_layers * self.config.d_model * tokens

    def _blocked(self, seen: int, T: int, starts: Tensor) -> Tensor:
        """What each row may not attend to (B, 1, T, S): later tokens, and what fills the row; but always to itself."""
        causal = self.blocks[0].attention.mask[seen : seen + T, : seen + T]  # type: ignore[index, union-attr]
        columns = torch.arange(seen + T, device=starts.device)
        itself = columns == columns[seen:, None]  # (T, S): what only fills must not be left with nothing, which is nan
        return ((causal | (columns < starts[:, None, None])) & ~itself)[:, None]

    def _embed(self, embedded: Tensor, seen: int = 0, starts: Tensor | None = None) -> Tensor:
        end = seen + embedded.shape[1]
        if end > self.config.context_length:
            raise ValueError(
                f"{end} tokens do not fit a context of {self.config.context_length}: pass the last ones only"
            )
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


class _Undrawn(TorchFunctionMode):
    """Within it random weights are not drawn, and memory for them is not touched.

    The meta device does the same, but there drawing imports PyTorch's compiler, which takes longer than it saves.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ in ("normal_", "uniform_", "kaiming_uniform_"):
            return None
        return func(*args, **(kwargs or {}))


class _TiedLookup(torch.autograd.Function):
    """The rows of an embedding for tokens, and the whole of it for the head.

    Adds in place to the head's gradient, which must be nobody else's: `next_token_loss` gives its own away.
    """

    @staticmethod
    def forward(ctx, idx: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(idx)
        return F.embedding(idx, weight), weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, rows_grad: Tensor, head_grad: Tensor):
        (idx,) = ctx.saved_tensors
        if head_grad.device.type == "cpu":
            return None, head_grad.index_add_(0, idx.flatten(), rows_grad.flatten(0, 1))
        # On a GPU index_add_ adds in no fixed order.
        return None, head_grad.add_(torch.ops.aten.embedding_dense_backward(rows_grad, idx, len(head_grad), -1, False))
