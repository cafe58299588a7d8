"""The schedule by hand, AdamW against PyTorch's, and Muon against its definition by singular values."""

import io
import itertools
import math

import pytest
import torch
from torch import Tensor

from gpt.model.transformer import GPT, GPTConfig, ModelConfig
from gpt.training.config import load_config
from gpt.training.forecast import optimizer_bytes
from gpt.training.optim import (
    OPTIMIZERS,
    POLAR_EXPRESS,
    POLAR_EXPRESS_LARGE,
    GPTOptimizer,
    OptimConfig,
    UpdateRule,
    build_optimizer,
    lr_multiplier,
    orthogonalize,
    set_lr,
    unused_settings,
)
from harness import begin_run, fit, read_table, tiny_config

LAYERS, D_MODEL, HEADS = 2, 6, 3
MATRICES = {
    f"blocks.{i}.{name}.weight"
    for i in range(LAYERS)
    for name in ("attention.W_qkv", "attention.out_proj", "feed_forward.expand", "feed_forward.contract")
}
EMBEDDINGS = {"token_embedding.weight", "position_embedding.weight"}

FACTORS = (1.0, 0.5, 0.0, 0.25, 1.0)  # of the rate, step by step
STEEP = {"warmup_steps": 4, "decay_from": 0.5, "final_lr": 0.25}  # in 24 steps: up in 4, at 1 until 12, then down


def make_model(heads: int = HEADS, **changes) -> GPT:
    """A small model, always the same."""
    torch.manual_seed(3)
    return GPT(GPTConfig(7, D_MODEL, LAYERS, heads, vocab_size=11, **changes))


def make_optimizer(model: GPT, dtype: torch.dtype = torch.float32, **changes) -> GPTOptimizer:
    config = OptimConfig(**changes).for_model(model.config)
    return build_optimizer(dict(model.named_parameters()), model.config.num_heads, config, dtype)


def set_gradients(model: GPT, step: int) -> dict[str, Tensor]:
    """Give every parameter a gradient that follows from the step, and return them by name."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def names_by_group(model: GPT, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The names of each group's parameters."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def values(model: GPT) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def polar_express(singular: Tensor, polynomials=POLAR_EXPRESS) -> Tensor:
    """What the iteration makes of singular values (..., rows), which are all that an odd polynomial changes."""
    x = singular / (singular.norm(dim=-1, keepdim=True) * 1.02 + 1e-6)
    for a, b, c in polynomials:
        x = a * x + b * x**3 + c * x**5
    return x


def muon_by_definition(start: Tensor, gradients: list[Tensor], first_step: int, config: OptimConfig) -> Tensor:
    """One matrix (rows, columns) after a Muon step for each gradient, written out in float64."""
    weight, average = start.double(), torch.zeros_like(start).double()
    along = 0 if start.shape[0] <= start.shape[1] else 1  # a mean for each column of a wide matrix, row of a tall one
    squares = torch.zeros_like(start).double().sum(along, keepdim=True)
    for step, gradient in enumerate(gradients, first_step):
        warm = min(step / 300, 1.0)
        momentum = config.momentum if config.momentum < 0.85 else 0.85 + (config.momentum - 0.85) * warm
        average = momentum * average + (1 - momentum) * gradient.double()
        nesterov = momentum * average + (1 - momentum) * gradient.double()
        U, S, Vh = torch.linalg.svd(nesterov, full_matrices=False)
        direction = U @ torch.diag(polar_express(S)) @ Vh
        squares = 0.95 * squares + 0.05 * direction.square().mean(along, keepdim=True)
        direction = direction / (squares / (1 - 0.95 ** (step + 1))).sqrt()
        lr = config.matrix_lr * FACTORS[step - first_step]
        weight = weight * (1 - lr * config.matrix_weight_decay)
        weight = weight - lr / math.sqrt(D_MODEL) * direction
    return weight.float()


# --- the schedule ---


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", {0: 0.25, 1: 0.5, 3: 1, 4: 1, 12: 1, 13: 0.9375, 16: 0.75, 18: 0.625, 23: 0.3125, 24: 0.25}),
        ("cosine", {0: 0.25, 1: 0.5, 3: 1, 4: 1, 12: 1, 16: 0.8125, 18: 0.625, 20: 0.4375, 24: 0.25}),
        ("constant", {0: 0.25, 1: 0.5, 3: 1, 4: 1, 12: 1, 18: 1, 24: 1}),
    ],
)
def test_schedule_hand_computed(schedule, expected):
    """Start, warm-up, plateau and fall; a third of a cosine's way is a quarter of its fall."""
    config = OptimConfig(schedule=schedule, **STEEP)
    assert {step: lr_multiplier(step, 24, config) for step in expected} == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("final_lr", [0.0, 0.25, 1.0])
def test_schedule_ends_exactly(schedule, final_lr):
    """The horizon has the final rate itself; the last update, a step earlier, has not yet."""
    for decay_from, total_steps in itertools.product((0.0, 0.5, 0.9), (10, 101, 3000)):
        config = OptimConfig(schedule=schedule, decay_from=decay_from, final_lr=final_lr)
        assert lr_multiplier(total_steps, total_steps, config) == final_lr
        assert final_lr == 1.0 or lr_multiplier(total_steps - 1, total_steps, config) > final_lr


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_long_warmup_takes_half_the_run(schedule):
    """A warm-up of 100 steps in a run of 10 takes 5, and the fall waits for it."""
    config = OptimConfig(schedule=schedule, warmup_steps=100, decay_from=0.0)
    assert [lr_multiplier(step, 10, config) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert (
        lr_multiplier(6, 10, config)
        == {"linear": 0.8, "cosine": 0.5 + 0.5 * math.cos(math.pi / 5), "constant": 1.0}[schedule]
    )
    assert lr_multiplier(10, 10, config) == (1.0 if schedule == "constant" else 0.0)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("total_steps", [1, 2, 3, 11, 101])
def test_schedule_rises_then_falls(schedule, total_steps):
    """Every update has a rate above nothing and at most the peak, which one of them has; none rises after it."""
    for warmup_steps, decay_from in itertools.product((0, 1, 7, 1000), (0.0, 0.5, 1.0)):
        config = OptimConfig(schedule=schedule, warmup_steps=warmup_steps, decay_from=decay_from)
        factors = [lr_multiplier(step, total_steps, config) for step in range(total_steps)]
        assert all(0 < factor <= 1 for factor in factors)
        peak = factors.index(1.0)
        assert peak <= total_steps // 2  # so that a run of one step trains in it
        assert factors[:peak] == sorted(factors[:peak]) and factors[peak:] == sorted(factors[peak:], reverse=True)


# --- the groups ---


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("qkv_bias", [True, False])
def test_groups(name, qkv_bias):
    """The matrices of the blocks, the embeddings, and norms and biases, which do not decay; nothing is left out."""
    model = make_model(qkv_bias=qkv_bias)
    optimizer = make_optimizer(model, name=name, weight_decay=0.3, matrix_weight_decay=0.7)
    groups = {group["param_type"]: group for group in optimizer.param_groups}
    names = dict(zip(groups, names_by_group(model, optimizer), strict=True))
    assert sorted(itertools.chain(*names.values())) == sorted(name for name, _ in model.named_parameters())
    assert (set(names["matrices"]), set(names["embeddings"])) == (MATRICES, EMBEDDINGS)
    assert all("norm" in name or name.endswith("bias") for name in names["vectors"])
    decay = {"matrices": 0.7 if name == "muon" else 0.3, "embeddings": 0.3, "vectors": 0.0}
    assert {param_type: group["weight_decay"] for param_type, group in groups.items()} == decay
    assert groups["matrices"]["num_blocks"] == [3 * HEADS if "W_qkv" in name else 1 for name in names["matrices"]]


def test_another_optimizer(corpus_folder, tmp_path, monkeypatch):
    """One that is only an entry in the table trains with its curves, is forecast, and refuses what it does not read."""

    def step(params, states, group, dtype):
        for p, state in zip(params, states, strict=True):
            state["mean"].lerp_(p.grad, 1.0 - group["betas"][0])
            p.sub_(state["mean"].sign(), alpha=group["lr"])

    rule = UpdateRule(
        {"lr": "lr", "weight_decay": "weight_decay", "betas": "betas"}, lambda p, _: {"mean": p * 0}, step
    )
    monkeypatch.setitem(OPTIMIZERS, "signs", dict.fromkeys(OPTIMIZERS["muon"], rule))
    training = begin_run(tiny_config(corpus_folder, "optim=signs", "horizon=3steps", f"run_dir={tmp_path / 'run'}"))
    fit(training)
    curves = read_table(tmp_path / "run")
    assert curves["train/lr"][-1] == (3, pytest.approx(training.config.optim.lr * lr_multiplier(2, 3, OptimConfig())))
    assert "train/matrix_lr" not in curves
    shape = GPTConfig(7, D_MODEL, LAYERS, HEADS, vocab_size=11)
    assert optimizer_bytes(shape, training.config) == 4 * shape.num_parameters
    assert unused_settings("signs") == unused_settings("adamw") == {"matrix_lr", "matrix_weight_decay", "momentum"}
    assert unused_settings("muon") == set()


# --- AdamW ---


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_adamw_equals_pytorch(name):
    """Over seven steps of changing rates, what AdamW has is moved as torch.optim.AdamW moves it."""
    ours, theirs = make_model(), make_model()
    optimizer = make_optimizer(ours, name=name, lr=0.05, weight_decay=0.3, betas=[0.8, 0.9])
    mine = {p for p, of in ours.named_parameters() if name == "adamw" or p not in MATRICES}
    parameters = {p: parameter for p, parameter in theirs.named_parameters() if p in mine}
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in parameters.values() if p.dim() == 2], "weight_decay": 0.3},
            {"params": [p for p in parameters.values() if p.dim() == 1], "weight_decay": 0.0},
        ],
        betas=(0.8, 0.9),
        foreach=False,
    )
    start = values(theirs)
    for step, factor in enumerate([0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.1]):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        set_lr(optimizer, factor)
        for group in reference.param_groups:
            group["lr"] = 0.05 * factor
        optimizer.step()
        reference.step()
    moved, expected = values(ours), values(theirs)
    assert len(mine) == {"adamw": 28, "muon": 20}[name]
    for parameter in mine:
        assert (expected[parameter] - start[parameter]).abs().max() > 0.01, parameter
        torch.testing.assert_close(moved[parameter], expected[parameter], atol=1e-6, rtol=1e-5)


# --- Muon ---


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 11), (13, 13), (31, 97)])
def test_orthogonalize(shape):
    """Singular vectors stay, and singular values become those of the polynomials."""
    matrices = torch.randn(5, *shape, generator=torch.Generator().manual_seed(7))
    U, S, Vh = torch.linalg.svd(matrices, full_matrices=False)
    expected = U @ torch.diag_embed(polar_express(S)) @ Vh
    torch.testing.assert_close(orthogonalize(matrices), expected, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("rows", [256, 257])
def test_orthogonalize_large(rows):
    """Matrices of more than 256 rows get another round, which their weaker directions need."""
    U, _ = torch.linalg.qr(torch.randn(rows, rows, generator=torch.Generator().manual_seed(7)))
    S = torch.logspace(0.0, -3.0, rows)
    strengths = (U.mT @ orthogonalize((U * S @ U.mT)[None])[0] @ U).diagonal()
    expected = polar_express(S, POLAR_EXPRESS_LARGE if rows > 256 else POLAR_EXPRESS)
    torch.testing.assert_close(strengths, expected, atol=1e-3, rtol=0.0)


@pytest.mark.parametrize(
    ("polynomials", "weakest", "low"), [(POLAR_EXPRESS, 0.005, 0.49), (POLAR_EXPRESS_LARGE, 0.001, 0.4)]
)
def test_polar_express(polynomials, weakest, low):
    """All singular values from the weakest on come near 1, as the polynomials were made to do."""
    singular = torch.logspace(math.log10(weakest), 0.0, 10000, dtype=torch.float64)
    for a, b, c in polynomials:
        singular = a * singular + b * singular**3 + c * singular**5
    assert low < singular.min() < singular.max() < 2.0 - low


@pytest.mark.parametrize("shape", [(1, 7), (31, 97)])
def test_orthogonalize_in_bfloat16(shape):
    """Directions thirty times weaker than others end about as strong, and point where they did."""
    random = torch.randn(5, *shape, generator=torch.Generator().manual_seed(7))
    U, _, Vh = torch.linalg.svd(random, full_matrices=False)
    matrices = U @ torch.diag(torch.logspace(0.0, -1.5, shape[0])) @ Vh
    result = orthogonalize(matrices.bfloat16())
    assert (result.shape, result.dtype) == (matrices.shape, torch.bfloat16)
    in_old_vectors = U.mT @ result.float() @ Vh.mT  # (5, rows, rows): diagonal where the vectors are the same
    strengths = in_old_vectors.diagonal(dim1=1, dim2=2)
    assert 0.35 < strengths.min() < strengths.max() < 1.65
    assert (in_old_vectors - torch.diag_embed(strengths)).abs().max() < 0.15


@pytest.mark.parametrize("size", [1e-2, -1.0, 1e6])
def test_orthogonalize_does_not_see_the_size(size):
    """A matrix whose singular values are all equal is its own direction, and its negative the opposite one."""
    rows = torch.linalg.qr(torch.randn(11, 7, generator=torch.Generator().manual_seed(7))).Q.mT  # (7, 11)
    expected = math.copysign(polar_express(torch.ones(7))[0].item(), size) * rows
    torch.testing.assert_close(orthogonalize(size * rows[None])[0], expected, atol=1e-3, rtol=0.0)


@pytest.mark.parametrize("first_step", [0, 150, 298])
@pytest.mark.parametrize(("momentum", "heads"), [(0.95, 3), (0.5, 3), (0.95, 1)])
def test_muon_by_definition(first_step, momentum, heads):
    """Five steps on square, wide, tall and fused matrices equal the definition, one matrix or head at a time.

    The rate is at its peak until it is set; a rate of zero, in the midst of them, changes nothing.
    """
    config = OptimConfig(matrix_lr=0.03, lr=0.01, matrix_weight_decay=0.7, momentum=momentum)
    model = make_model(heads)
    start = values(model)
    optimizer = build_optimizer(dict(model.named_parameters()), heads, config, torch.float32)
    optimizer.param_groups[0]["step"] = first_step
    gradients = []
    for step, factor in enumerate(FACTORS):
        gradients.append(set_gradients(model, step))
        before = values(model)
        if step:
            set_lr(optimizer, factor)
        optimizer.step()
        assert factor or all(torch.equal(value, before[name]) for name, value in values(model).items())
    assert optimizer.param_groups[0]["step"] == first_step + 5
    moved = values(model)
    for name in MATRICES:
        parts = 3 * heads if "W_qkv" in name else 1
        per_part = zip(*(gradient[name].chunk(parts) for gradient in gradients), strict=True)
        pieces = zip(start[name].chunk(parts), per_part, strict=True)
        expected = [muon_by_definition(piece, list(each), first_step, config) for piece, each in pieces]
        assert (moved[name] - start[name]).abs().max() > 0.01, name
        torch.testing.assert_close(moved[name], torch.cat(expected), atol=1e-5, rtol=0.0)


def test_muon_without_gradients():
    """Matrices, rows and columns whose gradients are all zero stay where they are, and nothing becomes nan."""
    model = make_model()
    optimizer = make_optimizer(model, matrix_weight_decay=0.0)
    start = values(model)
    set_gradients(model, 0)
    for name in MATRICES:
        gradient = model.get_parameter(name).grad
        if "expand" in name:
            gradient[5] = 0.0
        elif "contract" in name:
            gradient[:, 5] = 0.0
        else:
            gradient.zero_()
    optimizer.step()
    for name, value in values(model).items():
        moved = value != start[name]
        assert value.isfinite().all()
        if "expand.weight" in name:
            assert not moved[5].any() and moved[6].any()
        elif "contract.weight" in name:
            assert not moved[:, 5].any() and moved[:, 6].any()
        elif name in MATRICES:
            assert not moved.any()


def test_muon_in_bfloat16():
    """The orthogonalisation in bfloat16 gives a step close to that of fp32, but not the same."""
    moved = []
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model()
        optimizer = make_optimizer(model, dtype, matrix_lr=1.0, matrix_weight_decay=0.0)
        start = values(model)
        set_gradients(model, 0)
        optimizer.step()
        moved.append({name: value - start[name] for name, value in values(model).items()})
    for name in MATRICES:
        error = (moved[1][name] - moved[0][name]).norm() / moved[0][name].norm()
        assert 0 < error < 0.2, name


# --- the state ---


def continue_training(model: GPT, optimizer: GPTOptimizer, steps: range) -> None:
    """Steps at changing rates, whose gradients follow from the step."""
    for step in steps:
        set_gradients(model, step)
        set_lr(optimizer, lr_multiplier(step, 11, OptimConfig(warmup_steps=3)))
        optimizer.step()


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_state_continues_bit_for_bit(name):
    """Saved, loaded as plain data and continued, training ends in the very same weights."""
    whole = make_model()
    optimizer = make_optimizer(whole, name=name)
    continue_training(whole, optimizer, range(5))
    file = io.BytesIO()
    torch.save({"model": whole.state_dict(), "optimizer": optimizer.state_dict()}, file)
    continue_training(whole, optimizer, range(5, 11))

    ends = {}
    for with_state in (True, False):
        file.seek(0)
        payload = torch.load(file, weights_only=True)
        model = make_model()
        model.load_state_dict(payload["model"])
        other = make_optimizer(model, name=name)
        if with_state:
            other.load_state_dict(payload["optimizer"])
        continue_training(model, other, range(5, 11))
        ends[with_state] = values(model)
    assert all(torch.equal(value, ends[True][p]) for p, value in values(whole).items())
    assert not any(torch.equal(value, ends[False][p]) for p, value in values(whole).items())


def test_state_follows_the_parameters():
    """All of a state that was read on the CPU moves to the parameters' device, where fused kernels need it."""
    model = make_model()
    optimizer = make_optimizer(model)
    continue_training(model, optimizer, range(2))
    elsewhere = make_model().to("meta")
    other = make_optimizer(elsewhere)
    other.load_state_dict(optimizer.state_dict())
    devices = {key: value.device.type for state in other.state.values() for key, value in state.items()}
    assert devices == {"step": "meta", "exp_avg": "meta", "exp_avg_sq": "meta", "momentum": "meta", "squares": "meta"}


def test_closure():
    """A step with a closure evaluates it with gradients on, and returns its loss."""
    model = make_model()
    optimizer = make_optimizer(model)
    start = values(model)

    def closure() -> Tensor:
        loss = model(torch.arange(7)[None]).square().mean()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.item() > 0
    assert not torch.equal(model.token_embedding.weight, start["token_embedding.weight"])


# --- the configuration ---


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_config_limits_are_accepted(name):
    """Rates at their limits, no warm-up, no decay and no momentum still make finite steps."""
    limits = {"betas": [0.0, 0.0], "momentum": 0.0, "warmup_steps": 0, "decay_from": 1.0, "final_lr": 1.0}
    for lr, decay in itertools.product((1e-9, 10.0), (0.0, 0.1)):
        model = make_model()
        optimizer = make_optimizer(model, name=name, lr=lr, matrix_lr=lr, weight_decay=decay, **limits)
        continue_training(model, optimizer, range(2))
        assert all(value.isfinite().all() for value in values(model).values())


@pytest.mark.parametrize(
    ("layers", "channels", "matrix_lr", "lr"),
    [(4, 128, 0.02, 0.006), (64, 512, 0.0025, 0.003), (2, 64, 0.02, 0.012), (1, 8, 0.02, 0.012)],
)
def test_rates_suit_the_model(corpus_folder, tmp_path, layers, channels, matrix_lr, lr):
    """Those of mini are the known ones, and others follow from depth and width; given ones are taken as they stand."""
    shape = ModelConfig(num_layers=layers, d_model=channels)
    found = OptimConfig().for_model(shape)
    assert (found.matrix_lr, found.lr) == pytest.approx((matrix_lr, lr))
    assert OptimConfig(matrix_lr=0.5, lr=0.25).for_model(shape) == OptimConfig(matrix_lr=0.5, lr=0.25)
    changes = ["horizon=1steps", "optim.lr=0.125", f"run_dir={tmp_path / 'run'}"]
    stored = load_config(begin_run(tiny_config(corpus_folder, *changes)).path / "config.yaml")
    assert (stored.optim.matrix_lr, stored.optim.lr) == (OptimConfig().for_model(stored.model).matrix_lr, 0.125)
