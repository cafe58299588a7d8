"""GPT-2 (Radford et al. 2019): token and position embeddings, pre-norm transformer blocks, a tied output head.

Letters in shapes: B batch, T tokens, S tokens so far (T and those in the cache), C d_model, V vocabulary, L layers,
H heads.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpt.errors import UserError, require_range
from gpt.model.attention import KVCache, MultiHeadAttention
from gpt.model.fast.operations import SkipInit, tied_embedding
from gpt.model.linear import Linear

# Fields that GPT-2 has too. Exports and --compile support only these.
GPT2_FIELDS = {"vocab_size", "context_length", "d_model", "num_layers", "num_heads", "dropout", "qkv_bias"}


@dataclass
class ModelConfig:
    """The shape of a model without its vocabulary size, which the tokenizer sets. The defaults are mini's."""

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

    def require_gpt2(self, feature: str) -> None:
        """Raise `UserError` if a field that GPT-2 does not have is changed. `feature` would ignore it."""
        defaults = type(self)()
        for name, value in vars(self).items():
            if name not in GPT2_FIELDS and value != getattr(defaults, name):
                raise UserError(f"{feature} supports only GPT-2, which has no model.{name}={value!r}")

    @property
    def num_parameters(self) -> int:
        """The number of trained parameters. The tied head counts once."""
        return self.costs().parameters

    def costs(self) -> "ModelCosts":
        """Return what estimates of time and memory need. It is counted on the modules themselves, once per shape.

        This takes milliseconds: one block is built, without memory. `UserError` if the model is too large for PyTorch.
        """
        config_type: Any = type(self)
        return _count_costs(config_type, tuple(vars(self).values()))


@dataclass(frozen=True)
class ModelCosts:
    """What estimates of time and memory need to know about a model."""

    parameters: int  # the tied head counts once
    linear_weights: tuple[int, ...]  # the size of each linear map of a block
    block_weights: int  # in the linear maps of all blocks
    head_weights: int
    attention_width: int  # d_model times num_layers
    kept_in_fp32: int  # numbers per token that a block keeps for its backward pass
    kept_in_dtype: int  # the same in the precision of products, without attention scores

    def flops_per_token(self, sequence_length: int) -> int:
        """Return the floating-point operations to train on one token of a sequence.

        These are six for each weight that multiplies (two forward, four backward), and in each block 12 C for every
        token attended to, counting the full square of scores: Chowdhery et al. 2022 (PaLM), appendix B.
        """
        return 6 * (self.block_weights + self.head_weights) + 12 * self.attention_width * sequence_length


class FeedForward(nn.Module):
    """Two linear maps with GELU (tanh form) between them: C to 4C to C."""

    def __init__(self, d_model: int):
        super().__init__()
        self.expand = Linear(d_model, 4 * d_model)
        self.contract = Linear(4 * d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(self.expand(x), approximate="tanh")  # (B, T, 4C)
        return self.contract(inner)  # (B, T, C)


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); maps (B, T, C) to (B, T, C).

    Sums and norms keep the precision of x. Attention and feed-forward use the precision of their linear maps: see
    `Linear.dtype`. The fast twin for one token after a cache is gpt/model/fast/compiled.py.
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

    def forward(self, x: Tensor, cache: KVCache | None = None, mask: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), cache, mask))
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
        self.output: nn.Module | None = None  # sampling with packed weights replaces the tied head
        self.is_compiled = False  # by `compile_blocks`
        self.checkpointing = False  # recompute each block's activations in the backward pass
        self.init_weights()

    @classmethod
    def from_state_dict(cls, config: GPTConfig, state_dict: dict[str, Tensor]) -> "GPT":
        """Build an fp32 model around the tensors of a state dict. Tensors in fp32 are not copied.

        No initial weights are drawn: that would take a second for GPT-2 124M. `RuntimeError` if the tensors do not fit
        the model.
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
        | linear layers that add to the residual stream | N(0, 0.02 / sqrt(2 num_layers))|
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
        """Return the logits (B, T, V) of the token that follows each of the tokens idx (B, T)."""
        return self.head(self.forward_features(idx, caches))

    def forward_features(
        self, idx: Tensor, caches: list[KVCache] | None = None, pad_lengths: Tensor | None = None
    ) -> Tensor:
        """Return the final hidden states (B, T, C) of the tokens idx (B, T). `head` turns them into logits.

        Args:
            idx: Token ids (B, T).
            caches: From `init_kv_caches`. The tokens continue the cached ones, and the caches grow by T.
            pad_lengths: The padding (B,) at the left of each row, including cached tokens. Nothing attends to padding,
                and positions count from the first real token.
        """
        past_length = 0 if caches is None else caches[0].length
        x = self._embed(self.token_embedding(idx), past_length, pad_lengths)
        mask = None if pad_lengths is None else self._padding_mask(past_length, idx.shape[1], pad_lengths)
        return self._transform(x, caches, mask)

    def features_and_head(self, idx: Tensor, num_offsets: int = 1) -> tuple[Tensor, Tensor]:
        """Return what the training loss takes: the hidden states (B, T, C) of idx (B, T) and the head's weight (V, C).

        Short sequences teach all positions: of `num_offsets` rows, the first has the positions 0 to T - 1, the next T
        to 2 T - 1, and so on. Then the offsets repeat.
        """
        embedded, head_weight = tied_embedding(idx, self.token_embedding.weight)  # saves memory
        B, T, C = embedded.shape
        x = self._embed(embedded.view(B // num_offsets, num_offsets * T, C)).view(B, T, C)
        return self._transform(x), head_weight

    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states (..., C)."""
        if self.output is not None:
            return self.output(hidden)
        return F.linear(hidden, self.token_embedding.weight.to(hidden.dtype))

    def compile_blocks(self) -> None:
        """Compile the blocks, which share their graphs, and let the loss be compiled. For training on a GPU.

        Each shape of the input has its own graph. A graph for several shapes would be slower, and would differ in a
        resumed run, which meets the shapes in another order.
        """
        from torch._dynamo import config  # takes seconds, and only compiling needs it

        config.recompile_limit = 64  # graphs of a function; model=auto compiles for nine models
        config.optimize_ddp = False  # it would cut each block's graph in two
        self.is_compiled = True
        for block in self.blocks:
            block.compile(dynamic=False)

    def set_compute_dtype(self, dtype: torch.dtype) -> "GPT":
        """Let the linear maps of the blocks multiply in `dtype`. Return the model itself.

        Weights, norms and the residual stream keep their precision. They cost little, and would lose the most.
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
        """Return an empty key-value cache for each layer."""
        return [KVCache(self.config.context_length) for _ in self.blocks]

    @torch.no_grad()
    def attention_maps(self, idx: Tensor) -> Tensor:
        """Return every head's attention weights (B, L, H, T, T) on the tokens idx (B, T)."""
        x = self._embed(self.token_embedding(idx))
        maps = []
        for block in self.blocks:
            assert isinstance(block, TransformerBlock)
            maps.append(block.attention.weights(block.norm1(x)))
            x = block(x)
        return torch.stack(maps, dim=1)

    def _padding_mask(self, past_length: int, T: int, pad_lengths: Tensor) -> Tensor:
        """Return the mask (B, 1, T, S) that blocks later tokens and padding. No token blocks itself."""
        S = past_length + T
        causal = self.blocks[0].attention.mask[past_length:S, :S]  # type: ignore[index, union-attr]
        columns = torch.arange(S, device=pad_lengths.device)
        is_padding = columns < pad_lengths[:, None, None]  # (B, 1, S)
        is_itself = columns == columns[past_length:, None]  # (T, S): a row with everything blocked would be nan
        return ((causal | is_padding) & ~is_itself)[:, None]

    def _embed(self, embedded: Tensor, past_length: int = 0, pad_lengths: Tensor | None = None) -> Tensor:
        end = past_length + embedded.shape[1]
        limit = self.config.context_length
        if end > limit:
            raise ValueError(f"{end} tokens do not fit a context of {limit}: pass the last ones only")
        if pad_lengths is None:
            positions = self.position_embedding.weight[past_length:end]  # (T, C)
        else:
            columns = torch.arange(past_length, end, device=pad_lengths.device)
            positions = self.position_embedding((columns - pad_lengths[:, None]).clamp(min=0))  # (B, T, C)
        return self.dropout(embedded + positions)  # (B, T, C)

    def _transform(self, x: Tensor, caches: list[KVCache] | None = None, mask: Tensor | None = None) -> Tensor:
        for i, block in enumerate(self.blocks):
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)  # Chen et al. 2016 (arXiv:1604.06174)
            else:
                x = block(x, None if caches is None else caches[i], mask)
        return self.final_norm(x).to(self.dtype)


@functools.lru_cache(maxsize=256)
def _count_costs(config_type: Any, values: tuple) -> ModelCosts:
    config = config_type(*values)
    L = config.num_layers
    try:
        with torch.device("meta"), SkipInit():
            model = GPT(replace(config, num_layers=1))
    except (RuntimeError, TypeError, OverflowError):  # PyTorch counts bytes in 64 bits
        raise UserError(f"{config} is too large for any machine: choose a smaller model") from None
    block: Any = model.blocks[0]
    linears = [module for module in block.modules() if isinstance(module, Linear)]
    norms = [module for module in block.modules() if isinstance(module, nn.LayerNorm)]
    block_parameters = sum(p.numel() for p in block.parameters())
    linear_weights = tuple(linear.weight.numel() for linear in linears)
    return ModelCosts(
        parameters=sum(p.numel() for p in model.parameters()) + (L - 1) * block_parameters,
        linear_weights=linear_weights,
        block_weights=L * sum(linear_weights),
        head_weights=model.token_embedding.weight.numel(),
        attention_width=L * block.attention.out_proj.in_features,
        kept_in_fp32=sum(math.prod(norm.normalized_shape) for norm in norms),
        # The inputs of the linear maps, and what attention and GELU keep of their own inputs.
        kept_in_dtype=sum(linear.in_features for linear in linears)
        + block.attention.W_qkv.out_features
        + block.feed_forward.expand.out_features,
    )
