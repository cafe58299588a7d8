"""The optimizer and its schedule: Muon for the matrices of the blocks, AdamW for everything else, as one optimizer."""

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

# Odd polynomials a x + b x^3 + c x^5. Applied one after the other, they move every singular value of a matrix towards 1
# as fast as polynomials of this degree can: Amsel et al. 2025, "The Polar Express" (arXiv:2505.16932). These three,
# with room for rounding in bfloat16, bring all values above 0.005 to between 0.50 and 1.50.
POLAR_EXPRESS = (
    (8.216538472211699, -23.712001679746606, 17.21230421965734),
    (3.880284451292684, -2.839070438741758, 0.5328633304422103),
    (3.191423506000469, -2.396951700304201, 0.5010340500477566),
)
# The paper's own four rounds for values above 0.001: for large matrices, whose many directions are each weaker.
POLAR_EXPRESS_LARGE = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
)
LARGE_MATRIX = 256  # rows
MINI_MODEL = ModelConfig()  # whose rates are known best
MOMENTUM_WARMUP = (0.85, 300)  # Muon's momentum at the first step, and the steps until it reaches its final value
NORMALIZER_BETA = 0.95  # decay of the running mean square of Muon's directions

# How far the rates have fallen when `progress` of their fall has passed; both go from 0 to 1.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: progress,
    "cosine": lambda progress: (1.0 - math.cos(math.pi * progress)) / 2.0,
    "constant": lambda progress: 0.0,
}


@dataclass
class OptimConfig:
    """Which optimizer, and its rates over the run. Rates are peaks, reached after the warm-up."""

    name: str = "muon"  # muon, or adamw for everything
    matrix_lr: float | None = None  # Muon's rate; by default what suits the model: see `for_model`
    matrix_weight_decay: float = 0.1
    momentum: float = 0.95  # Muon's
    lr: float | None = None  # AdamW's rate; likewise
    weight_decay: float = 0.5  # AdamW's, on matrices and embeddings; never on norms and biases
    betas: list[float] = field(default_factory=lambda: [0.9, 0.99])
    clip: float = 0.0  # the largest norm of the whole gradient; 0 does not clip
    warmup_steps: int = 50
    schedule: str = "linear"  # how the rates fall: linear, cosine, or constant
    decay_from: float = 0.3  # the fraction of the run after which they fall
    final_lr: float = 0.0  # where they end, as a fraction of the peak

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
        """Return these settings with the rates that were left open: those of `mini`, scaled to depth and width.

        The layers add up in the residual stream, so Muon's steps shrink with their number, by an exponent between the
        1/2 of Yang et al. 2023 (arXiv:2310.02244) and the 1 of Dey et al. 2025 (CompleteP, arXiv:2505.01618); the width
        makes no difference to orthogonal steps (Yang et al. 2023, arXiv:2310.17813). AdamW's shrink with the width: an
        embedding's would not and a head's would as 1/width (Yang et al. 2022, arXiv:2203.03466), and these weights are
        both. Fewer layers than mini's bear no larger steps, and embeddings down to 64 channels bear all of 1/width:
        benchmarks/LOG.md has the losses at half and twice of each rate.
        """
        depth, width = model.num_layers / MINI_MODEL.num_layers, model.d_model / MINI_MODEL.d_model
        matrix_lr, lr = 0.02 * min(1.0, depth**-0.75), 0.006 * min(max(width**-0.5, 1 / width), 2.0)
        return replace(self, matrix_lr=self.matrix_lr or matrix_lr, lr=self.lr or lr)


def lr_multiplier(
    step: int, total_steps: int, config: OptimConfig, restart_step: int = 0, restart_lr_multiplier: float = 1.0
) -> float:
    """Return the learning rate of the update after `step` others, as a fraction of its peak, in a run of `total_steps`.

    It rises during the warm-up (at most half the run), stays at 1, falls from `decay_from` on, and would reach
    `final_lr` one update after the last. If the run was extended at `restart_step`, when it had fallen to
    `restart_lr_multiplier`, it returns from there to the schedule of the new horizon, as fast as in a warm-up:
    Ibrahim et al. 2024, "Simple and Scalable Strategies to Continually Pre-train Large Language Models".
    """
    warmup = min(config.warmup_steps, total_steps // 2)
    start = max(warmup, config.decay_from * total_steps)
    progress = max(0.0, (step - start) / max(1.0, total_steps - start))  # 0 where the fall begins, 1 at the horizon
    fallen = 1.0 - (1.0 - config.final_lr) * SCHEDULES[config.schedule](progress)
    returning = restart_lr_multiplier + (step + 1 - restart_step) / max(1, config.warmup_steps)
    return min(returning, (step + 1) / warmup if step < warmup else fallen)


def build_optimizer(
    weights: Mapping[str, Tensor], num_heads: int, config: OptimConfig, muon_dtype: torch.dtype
) -> torch.optim.Optimizer:
    """Build the optimizer for a GPT's weights by name, in a group for each type of parameter.

    The types are the blocks' `matrices`, the `embeddings`, and the `vectors` (norms and biases), which never decay.
    Every group keeps its peak rate under `peak_lr`; `set_lr` derives `lr` from it. `muon_dtype` is the precision of
    Muon's orthogonalisation: bfloat16 is enough, where the hardware is fast at it.
    """
    groups: dict[str, dict[str, Any]] = {}
    for param_type, rule in OPTIMIZERS[config.name].items():
        settings = {name: getattr(config, key) for name, key in rule.settings.items()}
        group = {"params": [], "num_blocks": [], "param_type": param_type, "step": 0, "peak_lr": settings["lr"]}
        groups[param_type] = group | settings
    groups["vectors"]["weight_decay"] = 0.0
    for name, parameter in weights.items():
        group = groups["vectors" if parameter.dim() < 2 else "matrices" if name.startswith("blocks.") else "embeddings"]
        group["params"].append(parameter)
        group["num_blocks"].append(3 * num_heads if name.endswith("W_qkv.weight") else 1)  # matrices stacked in it
    return GPTOptimizer(list(groups.values()), OPTIMIZERS[config.name], muon_dtype)


def set_lr(optimizer: torch.optim.Optimizer, multiplier: float) -> None:
    """Set the learning rate of every group to its peak times `multiplier`."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * multiplier


class GPTOptimizer(torch.optim.Optimizer):
    """One optimizer that updates the weights of each type by the rule for it."""

    def __init__(self, groups: list[dict], rules: Mapping[str, "UpdateRule"], muon_dtype: torch.dtype):
        super().__init__(groups, defaults={"fused": True})  # has PyTorch move all of a loaded state to the device
        self._rules, self._muon_dtype = rules, muon_dtype
        # Allocated now and not in the first step, where it would fragment the memory that activations use.
        for group in self.param_groups:
            for p, num_blocks in zip(group["params"], group["num_blocks"], strict=True):
                self.state[p] = rules[group["param_type"]].state(p, num_blocks)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        """Copy a state into this optimizer's own; `ValueError` unless it has the same names and shapes.

        Copying leaves nothing of the stored one in use, which may be mapped from a file.
        """
        stored, groups = state_dict["state"], state_dict["param_groups"]
        for group, settings in zip(self.param_groups, groups, strict=True):
            for p, number in zip(group["params"], settings["params"], strict=True):
                own, state = self.state[p], stored[number]
                if {name: value.shape for name, value in own.items()} != {name: v.shape for name, v in state.items()}:
                    raise ValueError("its optimizer's state does not fit the model's weights")
                for name, value in own.items():
                    value.copy_(state[name])
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
    rates = {"lr": group["lr"], "weight_decay": group["weight_decay"], "eps": 1e-8}
    rates |= {"beta1": group["betas"][0], "beta2": group["betas"][1]}
    grads = [p.grad for p in params]
    adamw(params, grads, averages, squares, [], steps, fused=True, amsgrad=False, maximize=False, **rates)


def _muon_state(p: Tensor, num_blocks: int) -> dict[str, Tensor]:
    return {"momentum": torch.zeros_like(p), "squares": p.new_zeros(num_blocks, max(len(p) // num_blocks, p.shape[1]))}


def _muon_step(params: list, states: list[dict], group: dict, dtype: torch.dtype) -> None:
    """Muon: Jordan et al. 2024.

    It steps along the orthogonalised momentum: all its singular values become 1, so a matrix learns as fast in its rare
    directions as in its dominant ones. The queries, keys and values of each head are separate matrices, which learn
    more per step that way; matrices of the same shape are orthogonalised as one batch. That leaves the rows of a tall
    matrix and the columns of a wide one uneven, so they are divided by their running root mean square, as in NorMuon
    (Li et al. 2025, arXiv:2510.05491). An entry then moves by lr / sqrt(d_model) per step in the root mean square,
    whatever its matrix, and for a while by up to 4.5 times as much where a row or column has been silent.
    """
    averages, grads = [s["momentum"] for s in states], [p.grad for p in params]
    first, warmup = MOMENTUM_WARMUP
    momentum = group["momentum"] - max(0.0, group["momentum"] - first) * max(0.0, 1.0 - group["step"] / warmup)
    torch._foreach_lerp_(averages, grads, 1.0 - momentum)
    nesterov = [update.to(dtype) for update in torch._foreach_lerp(grads, averages, momentum)]

    batches = defaultdict(list)  # (rows, columns) -> (matrices, updates, squares) of each parameter
    for p, update, state, num_blocks in zip(params, nesterov, states, group["num_blocks"], strict=True):
        matrices, pieces = p.view(num_blocks, -1, p.shape[1]), update.view(num_blocks, -1, p.shape[1])
        if pieces.shape[1] > pieces.shape[2]:
            matrices, pieces = matrices.mT, pieces.mT
        batches[pieces.shape[1:]].append((matrices, pieces, state["squares"]))
    torch._foreach_mul_(params, 1.0 - group["lr"] * group["weight_decay"])
    seen = 1.0 - NORMALIZER_BETA ** (group["step"] + 1)  # corrects running means that began at zero
    d_model = min(params[0].shape)  # the smaller side of every matrix in a block
    for batch in batches.values():
        # Per parameter: (num_blocks, rows, columns), (num_blocks, rows, columns), (num_blocks, columns)
        targets, updates, squares = zip(*batch, strict=True)
        sizes = list(map(len, squares))
        directions = orthogonalize(torch.cat(updates)).to(targets[0].dtype)
        torch._foreach_lerp_(squares, directions.square().mean(-2).split(sizes), 1.0 - NORMALIZER_BETA)
        usual = (torch.cat(squares) / seen).sqrt_().add_(1e-8)
        steps = directions.div_(usual[:, None]).split(sizes)
        torch._foreach_add_(targets, steps, alpha=-group["lr"] / math.sqrt(d_model))


def orthogonalize(matrices: Tensor) -> Tensor:
    """Approximate the nearest matrices with orthonormal rows: singular values end between 0.4 and 1.6.

    matrices (N, rows, columns) with rows <= columns, in the precision to compute in; returns the same shape. Directions
    200 times weaker than the whole matrix's norm (1,000 times in large matrices) stay weaker, which does no harm.
    """
    norms = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True, dtype=torch.float32).to(matrices.dtype)
    x = matrices / (norms * 1.02 + 1e-6)  # singular values at most 1, with room for rounding
    for a, b, c in POLAR_EXPRESS_LARGE if matrices.shape[-2] > LARGE_MATRIX else POLAR_EXPRESS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


@dataclass(frozen=True)
class UpdateRule:
    """A way to update weights; all decouple weight decay and scale it by the rate."""

    settings: dict[str, str]  # what its groups hold, by the key of `OptimConfig` that says it
    state: Callable[[Tensor, int], dict[str, Tensor]]  # of a weight with so many matrices stacked in it
    step: Callable[[list, list[dict], dict, torch.dtype], None]  # weights, states, group


ADAMW = UpdateRule({"lr": "lr", "weight_decay": "weight_decay", "betas": "betas"}, _adamw_state, _adamw_step)
MUON = UpdateRule(
    {"lr": "matrix_lr", "weight_decay": "matrix_weight_decay", "momentum": "momentum"}, _muon_state, _muon_step
)
# For each optimizer, the rule for each type of parameter. A new one takes an entry here, and a file of its settings
# in configs/optim.
OPTIMIZERS = {
    "muon": {"matrices": MUON, "embeddings": ADAMW, "vectors": ADAMW},
    "adamw": {"matrices": ADAMW, "embeddings": ADAMW, "vectors": ADAMW},
}


def unused_settings(name: str) -> set[str]:
    """Return the keys of `OptimConfig` that other optimizers read, and this one does not."""
    read = {
        name: {key for rule in rules.values() for key in rule.settings.values()} for name, rules in OPTIMIZERS.items()
    }
    return set().union(*read.values()) - read[name]
