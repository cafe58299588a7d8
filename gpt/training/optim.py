"""The optimizer and its schedule: Muon for the matrices of the blocks, AdamW for everything else, as one optimizer."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from gpt.errors import require_choice

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
MOMENTUM_WARMUP = (0.85, 300)  # Muon's momentum at the first step, and the steps until it reaches its final value
NORMALIZER_BETA = 0.95  # decay of the running mean square of Muon's directions


@dataclass
class OptimConfig:
    """Which optimizer, and its rates over the run. Rates are peaks, reached after the warm-up."""

    name: str = "muon"  # muon, or adamw for everything
    matrix_lr: float = 0.02  # Muon's rate
    matrix_weight_decay: float = 0.1
    momentum: float = 0.95  # Muon's
    lr: float = 0.006  # AdamW's rate
    weight_decay: float = 0.5  # AdamW's, on matrices and embeddings; never on norms and biases
    betas: list[float] = field(default_factory=lambda: [0.9, 0.99])
    clip: float = 0.0  # the largest norm of the whole gradient; 0 does not clip
    warmup_steps: int = 50
    schedule: str = "linear"  # how the rates fall: linear, cosine, or constant
    decay_from: float = 0.3  # the fraction of the run after which they fall
    final_lr: float = 0.0  # where they end, as a fraction of the peak

    def __post_init__(self) -> None:
        require_choice("optim.name", self.name, ("muon", "adamw"))
        require_choice("optim.schedule", self.schedule, ("linear", "cosine", "constant"))
        for name in ("matrix_lr", "lr"):
            _require_between(f"optim.{name}", getattr(self, name), 0.0, 10.0, above=True)
        for name in ("matrix_weight_decay", "weight_decay", "clip", "warmup_steps"):
            _require_between(f"optim.{name}", getattr(self, name), 0.0, math.inf)
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"optim.momentum={self.momentum} is out of range: it must be at least 0 and below 1")
        for name in ("decay_from", "final_lr"):
            _require_between(f"optim.{name}", getattr(self, name), 0.0, 1.0)
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"optim.betas={list(self.betas)} must be two numbers of at least 0 and below 1")


def _require_between(key: str, value: float, low: float, high: float, above: bool = False) -> None:
    if not low <= value <= high or (above and value == low):
        bound = "above" if above else "at least"
        raise ValueError(f"{key}={value} is out of range: it must be {bound} {low:g} and at most {high:g}")


def lr_factor(
    step: int, total_steps: int, config: OptimConfig, extended_at: int = 0, factor_then: float = 1.0
) -> float:
    """The fraction of the peak rate for the update that follows `step` earlier ones, in a run of `total_steps`.

    It rises during the warm-up (at most half the run), stays at 1, falls from `decay_from` on, and would reach
    `final_lr` one update after the last. A run that was given a new horizon at step `extended_at`, when its rates had
    fallen to `factor_then` of the peak, returns from there to the schedule of the new horizon, as fast as in a warm-up:
    Ibrahim et al. 2024, "Simple and Scalable Strategies to Continually Pre-train Large Language Models".
    """
    rise = factor_then + (step + 1 - extended_at) / max(1, config.warmup_steps)
    return min(rise, _scheduled(step, total_steps, config))


def _scheduled(step: int, total_steps: int, config: OptimConfig) -> float:
    """The schedule of a run that trains to its first horizon."""
    warmup = min(config.warmup_steps, total_steps // 2)
    if step < warmup:
        return (step + 1) / warmup
    start = max(warmup, config.decay_from * total_steps)
    progress = max(0.0, (step - start) / max(1.0, total_steps - start))  # 0 where the fall begins, 1 at the horizon
    if config.schedule == "constant":
        return 1.0
    fall = progress if config.schedule == "linear" else (1.0 - math.cos(math.pi * progress)) / 2.0
    return 1.0 - (1.0 - config.final_lr) * fall


def build_optimizer(
    weights: Mapping[str, Tensor], num_heads: int, config: OptimConfig, muon_dtype: torch.dtype
) -> torch.optim.Optimizer:
    """Build the optimizer for a GPT's weights by name: with `muon`, Muon gets the blocks' matrices and AdamW the rest.

    Muon treats the queries, keys and values of each head as separate matrices, and learns more per step that way.
    Every group keeps its peak rate under `peak_lr`; `set_lr` derives `lr` from it. `muon_dtype` is the precision of
    Muon's orthogonalisation: bfloat16 is enough, where the hardware is fast at it.
    """
    matrices, embeddings, vectors = [], [], []
    for name, parameter in weights.items():
        if parameter.dim() < 2:
            vectors.append(parameter)
        elif name.startswith("blocks.") and config.name == "muon":
            matrices.append((parameter, 3 * num_heads if name.endswith("W_qkv.weight") else 1))
        else:
            embeddings.append(parameter)
    groups: list[dict] = [
        {"params": embeddings, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    for group in groups:
        group |= {"algorithm": "adamw", "lr": config.lr, "betas": tuple(config.betas), "eps": 1e-8, "fused": True}
    if matrices:
        params, parts = zip(*matrices, strict=True)
        muon = {"algorithm": "muon", "lr": config.matrix_lr, "momentum": config.momentum, "step": 0}
        muon |= {"params": list(params), "parts": list(parts), "weight_decay": config.matrix_weight_decay}
        muon["d_model"] = min(params[0].shape)  # the smaller side of every matrix in a block
        groups.append(muon)
    for group in groups:
        group["peak_lr"] = group["lr"]
    return MuonAdamW(groups, muon_dtype)


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the rate of every group to its peak times `factor`."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor


class MuonAdamW(torch.optim.Optimizer):
    """One optimizer with two rules: groups with `algorithm="muon"` and groups with `algorithm="adamw"`.

    Muon (Jordan et al. 2024) steps along the orthogonalised momentum: all its singular values become 1, so a matrix
    learns as fast in its rare directions as in its dominant ones. `parts` says how many matrices are stacked in each
    parameter; matrices of the same shape are orthogonalised as one batch. Orthogonalising leaves the rows of a tall
    matrix and the columns of a wide one uneven, so they are divided by their running root mean square, as in NorMuon
    (Li et al. 2025, arXiv:2510.05491). An entry then moves by lr / sqrt(d_model) per step in the root mean square,
    whatever its matrix, and for a while by up to 4.5 times as much where a row or column has been silent.
    AdamW is Loshchilov and Hutter 2019. Both decouple weight decay and scale it by the rate.
    """

    def __init__(self, groups: list[dict], muon_dtype: torch.dtype = torch.bfloat16):
        super().__init__(groups, defaults={})
        self.muon_dtype = muon_dtype
        # Allocated now and not in the first step, where it would fragment the memory that activations use.
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if group["algorithm"] == "muon":
                    parts = group["parts"][i]
                    squares = p.new_zeros(parts, max(len(p) // parts, p.shape[1]))
                    self.state[p] = {"momentum": torch.zeros_like(p), "squares": squares}
                else:
                    step = torch.zeros((), dtype=torch.float32, device=p.device)
                    self.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["algorithm"] == "muon":
                self._muon(group)
            else:
                self._adamw(group)
        return loss

    def _adamw(self, group: dict) -> None:
        params = group["params"]
        states = [self.state[p] for p in params]
        adamw(
            params,
            [p.grad for p in params],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            fused=group["fused"],  # in the group because PyTorch looks there when it moves state to a device
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _muon(self, group: dict) -> None:
        params = group["params"]
        grads = [p.grad for p in params]
        averages = [self.state[p]["momentum"] for p in params]
        momentum = _momentum_at(group["step"], group["momentum"])
        group["step"] += 1
        torch._foreach_lerp_(averages, grads, 1.0 - momentum)
        nesterov = [update.to(self.muon_dtype) for update in torch._foreach_lerp(grads, averages, momentum)]

        batches = defaultdict(list)  # (rows, columns) -> (matrices, updates, squares) of each parameter
        for p, update, parts in zip(params, nesterov, group["parts"], strict=True):
            matrices, pieces = p.view(parts, -1, p.shape[1]), update.view(parts, -1, p.shape[1])
            if pieces.shape[1] > pieces.shape[2]:
                matrices, pieces = matrices.mT, pieces.mT
            batches[pieces.shape[1:]].append((matrices, pieces, self.state[p]["squares"]))
        torch._foreach_mul_(params, 1.0 - group["lr"] * group["weight_decay"])
        seen = 1.0 - NORMALIZER_BETA ** group["step"]  # corrects running means that began at zero
        for batch in batches.values():
            # Per parameter: (parts, rows, columns), (parts, rows, columns), (parts, columns)
            targets, updates, squares = zip(*batch, strict=True)
            sizes = list(map(len, squares))
            directions = orthogonalize(torch.cat(updates)).to(targets[0].dtype)
            torch._foreach_lerp_(squares, directions.square().mean(-2).split(sizes), 1.0 - NORMALIZER_BETA)
            usual = (torch.cat(squares) / seen).sqrt_().add_(1e-8)
            steps = directions.div_(usual[:, None]).split(sizes)
            torch._foreach_add_(targets, steps, alpha=-group["lr"] / math.sqrt(group["d_model"]))


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


def _momentum_at(step: int, final: float) -> float:
    first, steps = MOMENTUM_WARMUP
    return final - max(0.0, final - first) * max(0.0, 1.0 - step / steps)
