"""The optimizer: Muon for the matrices of the blocks, and AdamW for all other weights.

A new optimizer is an entry in `OPTIMIZERS`, at the end, and a file of its settings in configs/optim.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from gpt.errors import UserError, require_choice, require_range
from gpt.model.transformer import ModelConfig
from gpt.training.lr_schedule import SCHEDULES

# Odd polynomials a x + b x^3 + c x^5. Applied in turn, they move the singular values of a matrix towards 1 as fast as
# polynomials of degree 5 can: Amsel et al. 2025, "The Polar Express" (arXiv:2505.16932). These three leave room for
# rounding in bfloat16. They move all values above 0.005 to between 0.50 and 1.50.
POLAR_EXPRESS = (
    (8.216538472211699, -23.712001679746606, 17.21230421965734),
    (3.880284451292684, -2.839070438741758, 0.5328633304422103),
    (3.191423506000469, -2.396951700304201, 0.5010340500477566),
)
# The paper's four polynomials for values above 0.001. Large matrices need them, because each direction is weaker.
POLAR_EXPRESS_LARGE = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
)
LARGE_MATRIX_ROWS = 256  # matrices with more rows use POLAR_EXPRESS_LARGE
MINI_MODEL = ModelConfig()  # the model with the best measured learning rates
INITIAL_MOMENTUM = 0.85  # of Muon; it rises to `momentum`
MOMENTUM_WARMUP_STEPS = 300
NORMALIZER_BETA = 0.95  # decay of the running mean square of Muon's directions


@dataclass
class OptimConfig:
    """The optimizer and its learning rates. The rates are peaks, reached after the warmup."""

    name: str = "muon"  # a key of OPTIMIZERS
    matrix_lr: float | None = None  # Muon's learning rate; null: scaled to the model by `for_model`
    matrix_weight_decay: float = 0.1
    momentum: float = 0.95  # of Muon
    lr: float | None = None  # AdamW's learning rate; null: scaled to the model
    weight_decay: float = 0.5  # of AdamW, on matrices and embeddings; never on norms and biases
    betas: list[float] = field(default_factory=lambda: [0.9, 0.99])
    clip: float = 0.0  # maximum norm of the whole gradient; 0 turns clipping off
    warmup_steps: int = 50
    schedule: str = "linear"  # shape of the decay: a key of SCHEDULES
    decay_from: float = 0.3  # fraction of the run before the decay
    final_lr: float = 0.0  # learning rate at the end, as a fraction of the peak

    def __post_init__(self) -> None:
        require_choice("optim.name", self.name, tuple(OPTIMIZERS))
        require_choice("optim.schedule", self.schedule, tuple(SCHEDULES))
        for name in ("matrix_lr", "lr"):
            if getattr(self, name) is not None:
                require_range(f"optim.{name}", getattr(self, name), 0, 10, above=True)
        for name in ("matrix_weight_decay", "weight_decay", "clip", "warmup_steps"):
            require_range(f"optim.{name}", getattr(self, name), 0)
        require_range("optim.momentum", self.momentum, 0, 1, below=True)
        for name in ("decay_from", "final_lr"):
            require_range(f"optim.{name}", getattr(self, name), 0, 1)
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise UserError(f"optim.betas={list(self.betas)} must be two numbers of at least 0 and below 1")

    def for_model(self, model: ModelConfig) -> "OptimConfig":
        """Return these settings with default learning rates: the rates of `mini`, scaled to the model.

        Muon's rate falls with the depth, because the layers add up in the residual stream. Its exponent lies between
        the 1/2 of Yang et al. 2023 (arXiv:2310.02244) and the 1 of Dey et al. 2025 (CompleteP, arXiv:2505.01618). The
        width makes no difference to orthogonal steps (Yang et al. 2023, arXiv:2310.17813).

        AdamW's rate falls with the width. The embeddings are tied to the head: alone, they would need the same rate at
        every width, and the head 1/width (Yang et al. 2022, arXiv:2203.03466). Models with fewer layers than mini gain
        nothing from larger steps. Down to 64 channels, embeddings do best at 1/width. benchmarks/LOG.md has the losses
        at half and twice each rate.
        """
        depth = model.num_layers / MINI_MODEL.num_layers
        width = model.d_model / MINI_MODEL.d_model
        matrix_lr = 0.02 * min(1.0, depth**-0.75)
        lr = 0.006 * min(max(width**-0.5, 1 / width), 2.0)
        return replace(self, matrix_lr=self.matrix_lr or matrix_lr, lr=self.lr or lr)


def build_optimizer(
    weights: Mapping[str, Tensor], num_heads: int, config: OptimConfig, muon_dtype: torch.dtype
) -> torch.optim.Optimizer:
    """Return the optimizer for the weights of a GPT, with a group for each type of parameter.

    The types are `matrices` (of the blocks), `embeddings`, and `vectors` (norms and biases, without weight decay).
    Each group stores its peak learning rate as `peak_lr`, from which `set_lr` computes `lr`.

    Args:
        weights: Names to parameters.
        num_heads: W_qkv holds a query, key and value matrix for each head.
        config: The optimizer and its settings.
        muon_dtype: Muon orthogonalizes in this precision. bfloat16 is accurate enough.
    """
    groups: dict[str, dict[str, Any]] = {}
    for param_type, rule in OPTIMIZERS[config.name].items():
        settings = {name: getattr(config, key) for name, key in rule.settings.items()}
        group = {"params": [], "num_blocks": [], "param_type": param_type, "step": 0, "peak_lr": settings["lr"]}
        groups[param_type] = group | settings
    groups["vectors"]["weight_decay"] = 0.0
    for name, parameter in weights.items():
        if parameter.dim() < 2:
            group = groups["vectors"]
        else:
            group = groups["matrices" if name.startswith("blocks.") else "embeddings"]
        group["params"].append(parameter)
        group["num_blocks"].append(3 * num_heads if name.endswith("W_qkv.weight") else 1)  # matrices stacked in W_qkv
    return GPTOptimizer(list(groups.values()), OPTIMIZERS[config.name], muon_dtype)


def set_lr(optimizer: torch.optim.Optimizer, multiplier: float) -> None:
    """Set the learning rate of every group to its peak times `multiplier`."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * multiplier


class GPTOptimizer(torch.optim.Optimizer):
    """An optimizer with an update rule for each type of parameter."""

    def __init__(self, groups: list[dict], rules: Mapping[str, "UpdateRule"], muon_dtype: torch.dtype):
        super().__init__(groups, defaults={"fused": True})  # so that PyTorch moves a loaded state to the device
        self._rules = rules
        self._muon_dtype = muon_dtype
        # Allocating the state in the first step would fragment the memory for activations.
        for group in self.param_groups:
            for p, num_blocks in zip(group["params"], group["num_blocks"], strict=True):
                self.state[p] = rules[group["param_type"]].state(p, num_blocks)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        """Copy a stored state into the existing tensors, because the stored tensors may be mapped from a file.

        Raises:
            ValueError: The stored state has other names or shapes.
        """
        stored, groups = state_dict["state"], state_dict["param_groups"]
        for group, settings in zip(self.param_groups, groups, strict=True):
            for p, number in zip(group["params"], settings["params"], strict=True):
                state = self.state[p]
                stored_shapes = {name: value.shape for name, value in stored[number].items()}
                if {name: value.shape for name, value in state.items()} != stored_shapes:
                    raise ValueError("its optimizer's state does not fit the model's weights")
                for name, value in state.items():
                    value.copy_(stored[number][name])
            group |= {name: value for name, value in settings.items() if name != "params"}

    @torch.no_grad()
    def step(self, closure=None):
        """Update the weights."""
        with torch.enable_grad():
            loss = closure() if closure else None
        for group in self.param_groups:
            states = [self.state[p] for p in group["params"]]
            self._rules[group["param_type"]].step(group["params"], states, group, self._muon_dtype)
            group["step"] += 1
        return loss


def _adamw_state(p: Tensor, num_blocks: int) -> dict[str, Tensor]:
    step = torch.zeros((), dtype=torch.float32, device=p.device)
    return {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}


def _adamw_step(params: list, states: list[dict], group: dict, dtype: torch.dtype) -> None:
    """AdamW: Loshchilov and Hutter 2019."""
    averages, squares, steps = ([s[name] for s in states] for name in ("exp_avg", "exp_avg_sq", "step"))
    beta1, beta2 = group["betas"]
    options = {"lr": group["lr"], "weight_decay": group["weight_decay"], "beta1": beta1, "beta2": beta2, "eps": 1e-8}
    grads = [p.grad for p in params]
    adamw(params, grads, averages, squares, [], steps, fused=True, amsgrad=False, maximize=False, **options)


def _muon_state(p: Tensor, num_blocks: int) -> dict[str, Tensor]:
    long_side = max(len(p) // num_blocks, p.shape[1])
    return {"momentum": torch.zeros_like(p), "squares": p.new_zeros(num_blocks, long_side)}


def _muon_step(params: list, states: list[dict], group: dict, dtype: torch.dtype) -> None:
    """Muon: Jordan et al. 2024.

    The step is the orthogonalized momentum. All its singular values are 1, so a matrix learns as fast in its rare
    directions as in its dominant ones. The queries, keys and values of each head are separate matrices: they learn more
    per step that way. Matrices of the same shape are orthogonalized as one batch.

    Orthogonal steps leave the rows of a tall matrix and the columns of a wide matrix uneven. So these are divided by
    their running root mean square, as in NorMuon (Li et al. 2025, arXiv:2510.05491). The root mean square of a step's
    entries is then lr / sqrt(d_model) in every matrix. A row or column that had no gradient before moves up to 4.5
    times as far at first.
    """
    averages = [s["momentum"] for s in states]
    grads = [p.grad for p in params]
    warmup_left = max(0.0, 1.0 - group["step"] / MOMENTUM_WARMUP_STEPS)
    momentum = group["momentum"] - max(0.0, group["momentum"] - INITIAL_MOMENTUM) * warmup_left
    torch._foreach_lerp_(averages, grads, 1.0 - momentum)
    nesterov = [update.to(dtype) for update in torch._foreach_lerp(grads, averages, momentum)]

    batches = defaultdict(list)  # (rows, columns) -> (matrices, updates, squares) of each parameter
    for p, update, state, num_blocks in zip(params, nesterov, states, group["num_blocks"], strict=True):
        matrices = p.view(num_blocks, -1, p.shape[1])
        blocks = update.view(num_blocks, -1, p.shape[1])
        if blocks.shape[1] > blocks.shape[2]:
            matrices, blocks = matrices.mT, blocks.mT
        batches[blocks.shape[1:]].append((matrices, blocks, state["squares"]))
    torch._foreach_mul_(params, 1.0 - group["lr"] * group["weight_decay"])
    bias_correction = 1.0 - NORMALIZER_BETA ** (group["step"] + 1)  # of running means that began at zero
    d_model = min(params[0].shape)  # the smaller side of every matrix in a block
    for batch in batches.values():
        # Per parameter: (num_blocks, rows, columns), (num_blocks, rows, columns), (num_blocks, columns)
        targets, updates, squares = zip(*batch, strict=True)
        sizes = list(map(len, squares))
        directions = orthogonalize(torch.cat(updates)).to(targets[0].dtype)
        torch._foreach_lerp_(squares, directions.square().mean(-2).split(sizes), 1.0 - NORMALIZER_BETA)
        root_mean_squares = (torch.cat(squares) / bias_correction).sqrt_().add_(1e-8)
        steps = directions.div_(root_mean_squares[:, None]).split(sizes)
        torch._foreach_add_(targets, steps, alpha=-group["lr"] / math.sqrt(d_model))


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return approximately the nearest matrices with orthonormal rows. Their singular values are between 0.4 and 1.6.

    matrices: (N, rows, columns) with rows <= columns, in the precision to compute in. The result has the same shape.
    Singular values below 1/200 of the matrix norm (1/1,000 in large matrices) stay smaller. That does no harm.
    """
    norms = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True, dtype=torch.float32).to(matrices.dtype)
    x = matrices / (norms * 1.02 + 1e-6)  # singular values at most 1, with room for rounding
    for a, b, c in POLAR_EXPRESS_LARGE if matrices.shape[-2] > LARGE_MATRIX_ROWS else POLAR_EXPRESS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


@dataclass(frozen=True)
class UpdateRule:
    """A way to update weights. All rules decouple weight decay and multiply it by the learning rate.

    Args:
        settings: The names of the group's settings to the keys of `OptimConfig` that set them.
        state: Returns the initial state of a weight and the number of matrices stacked in it.
        step: Updates weights; its arguments are the weights, their states, the group, and Muon's precision.
    """

    settings: dict[str, str]
    state: Callable[[Tensor, int], dict[str, Tensor]]
    step: Callable[[list, list[dict], dict, torch.dtype], None]


ADAMW = UpdateRule({"lr": "lr", "weight_decay": "weight_decay", "betas": "betas"}, _adamw_state, _adamw_step)
MUON = UpdateRule(
    {"lr": "matrix_lr", "weight_decay": "matrix_weight_decay", "momentum": "momentum"}, _muon_state, _muon_step
)
# For each optimizer, the rule for each type of parameter.
OPTIMIZERS = {
    "muon": {"matrices": MUON, "embeddings": ADAMW, "vectors": ADAMW},
    "adamw": {"matrices": ADAMW, "embeddings": ADAMW, "vectors": ADAMW},
}


def unused_settings(name: str) -> set[str]:
    """Return the keys of `OptimConfig` that only other optimizers use."""
    used = {key for rule in OPTIMIZERS[name].values() for key in rule.settings.values()}
    all_rules = [rule for rules in OPTIMIZERS.values() for rule in rules.values()]
    return {key for rule in all_rules for key in rule.settings.values()} - used
