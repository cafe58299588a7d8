"""The optimizer: AdamW against PyTorch's, and Muon against its definition by singular values."""

import io
import itertools
import math

import pytest
import torch
from torch import Tensor

from gpt.api import read_curves
from gpt.model.transformer import GPT, GPTConfig, ModelConfig
from gpt.training.forecast import optimizer_bytes
from gpt.training.lr_schedule import lr_multiplier
from gpt.training.optim import (
    OPTIMIZERS,
    POLAR_EXPRESS,
    POLAR_EXPRESS_LARGE,
    GPTOptimizer,
    OptimConfig,
    UpdateRule,
    build_optimizer,
    orthogonalize,
    set_lr,
    unused_settings,
)
from harness import begin_run, fit, tiny_config

LAYERS, D_MODEL, HEADS = 2, 6, 3
MATRICES = {
    f"blocks.{i}.{name}.weight"
    for i in range(LAYERS)
    for name in ("attention.W_qkv", "attention.out_proj", "feed_forward.expand", "feed_forward.contract")
}
EMBEDDINGS = {"token_embedding.weight", "position_embedding.weight"}

LR_MULTIPLIERS = (1.0, 0.5, 0.0, 0.25, 1.0)  # for each step


def make_model(heads: int = HEADS, **changes) -> GPT:
    """Return a small model, always with the same weights."""
    torch.manual_seed(3)
    return GPT(GPTConfig(7, D_MODEL, LAYERS, heads, vocab_size=11, **changes))


def make_optimizer(model: GPT, dtype: torch.dtype = torch.float32, **changes) -> GPTOptimizer:
    config = OptimConfig(**changes).for_model(model.config)
    return build_optimizer(dict(model.named_parameters()), model.config.num_heads, config, dtype)


def set_gradients(model: GPT, step: int) -> dict[str, Tensor]:
    """Set gradients that depend on the step only, and return them by name."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def names_by_group(model: GPT, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of the parameters in each group."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def values(model: GPT) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def polar_express(singular: Tensor, polynomials=POLAR_EXPRESS) -> Tensor:
    """Return the singular values (..., rows) after the iteration: odd polynomials change nothing else."""
    x = singular / (singular.norm(dim=-1, keepdim=True) * 1.02 + 1e-6)
    for a, b, c in polynomials:
        x = a * x + b * x**3 + c * x**5
    return x


def muon_by_definition(start: Tensor, gradients: list[Tensor], first_step: int, config: OptimConfig) -> Tensor:
    """Return a matrix (rows, columns) after a Muon step for each gradient, computed in float64."""
    weight = start.double()
    average = torch.zeros_like(weight)
    dim = 0 if start.shape[0] <= start.shape[1] else 1  # columns of a wide matrix, rows of a tall one
    squares = torch.zeros_like(weight).sum(dim, keepdim=True)
    for step, gradient in enumerate(gradients, first_step):
        warmup = min(step / 300, 1.0)
        momentum = config.momentum if config.momentum < 0.85 else 0.85 + (config.momentum - 0.85) * warmup
        average = momentum * average + (1 - momentum) * gradient.double()
        nesterov = momentum * average + (1 - momentum) * gradient.double()
        U, S, Vh = torch.linalg.svd(nesterov, full_matrices=False)
        direction = U @ torch.diag(polar_express(S)) @ Vh
        squares = 0.95 * squares + 0.05 * direction.square().mean(dim, keepdim=True)
        direction = direction / (squares / (1 - 0.95 ** (step + 1))).sqrt()
        lr = config.matrix_lr * LR_MULTIPLIERS[step - first_step]
        weight = weight * (1 - lr * config.matrix_weight_decay)
        weight = weight - lr / math.sqrt(D_MODEL) * direction
    return weight.float()


# --- the groups ---


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("qkv_bias", [True, False])
def test_each_parameter_is_in_the_group_of_its_type(name, qkv_bias):
    """The groups are the matrices of the blocks, the embeddings, and the vectors, which have no weight decay."""
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


def test_a_new_optimizer_is_an_entry_in_the_table(corpus_folder, tmp_path, monkeypatch):
    """It trains and has curves, its memory is forecast, and its unused settings are known."""

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
    curves = read_curves(tmp_path / "run")
    assert curves["train/lr"][-1] == (3, pytest.approx(training.config.optim.lr * lr_multiplier(2, 3, OptimConfig())))
    assert "train/matrix_lr" not in curves
    shape = GPTConfig(7, D_MODEL, LAYERS, HEADS, vocab_size=11)
    assert optimizer_bytes(shape, training.config) == 4 * shape.num_parameters
    assert unused_settings("signs") == unused_settings("adamw") == {"matrix_lr", "matrix_weight_decay", "momentum"}
    assert unused_settings("muon") == set()


# --- AdamW ---


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_adamw_equals_pytorch(name):
    """AdamW, alone or beside Muon, moves its weights as torch.optim.AdamW does, at changing learning rates."""
    model = make_model()
    reference_model = make_model()
    optimizer = make_optimizer(model, name=name, lr=0.05, weight_decay=0.3, betas=[0.8, 0.9])
    names = {p for p, _ in model.named_parameters() if name == "adamw" or p not in MATRICES}
    parameters = {p: parameter for p, parameter in reference_model.named_parameters() if p in names}
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in parameters.values() if p.dim() == 2], "weight_decay": 0.3},
            {"params": [p for p in parameters.values() if p.dim() == 1], "weight_decay": 0.0},
        ],
        betas=(0.8, 0.9),
        foreach=False,
    )
    start = values(reference_model)
    for step, multiplier in enumerate([0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.1]):
        set_gradients(model, step)
        set_gradients(reference_model, step)
        set_lr(optimizer, multiplier)
        for group in reference.param_groups:
            group["lr"] = 0.05 * multiplier
        optimizer.step()
        reference.step()
    moved = values(model)
    expected = values(reference_model)
    assert len(names) == {"adamw": 28, "muon": 20}[name]
    for parameter in names:
        assert (expected[parameter] - start[parameter]).abs().max() > 0.01, parameter
        torch.testing.assert_close(moved[parameter], expected[parameter], atol=1e-6, rtol=1e-5)


# --- Muon ---


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 11), (13, 13), (31, 97)])
def test_orthogonalize(shape):
    """The singular vectors stay, and the polynomials map the singular values. The scale does not matter."""
    matrices = torch.randn(5, *shape, generator=torch.Generator().manual_seed(7))
    U, S, Vh = torch.linalg.svd(matrices, full_matrices=False)
    for scale in (1e-2, 1.0, 1e6):
        expected = U @ torch.diag_embed(polar_express(scale * S)) @ Vh
        torch.testing.assert_close(orthogonalize(scale * matrices), expected, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("rows", [256, 257])
def test_orthogonalize_large(rows):
    """Matrices of more than 256 rows use the four polynomials for weaker directions."""
    U, _ = torch.linalg.qr(torch.randn(rows, rows, generator=torch.Generator().manual_seed(7)))
    S = torch.logspace(0.0, -3.0, rows)
    strengths = (U.mT @ orthogonalize((U * S @ U.mT)[None])[0] @ U).diagonal()
    expected = polar_express(S, POLAR_EXPRESS_LARGE if rows > 256 else POLAR_EXPRESS)
    torch.testing.assert_close(strengths, expected, atol=1e-3, rtol=0.0)


@pytest.mark.parametrize(
    ("polynomials", "weakest", "low"), [(POLAR_EXPRESS, 0.005, 0.49), (POLAR_EXPRESS_LARGE, 0.001, 0.4)]
)
def test_polar_express(polynomials, weakest, low):
    """The polynomials move all singular values above the weakest near to 1."""
    singular = torch.logspace(math.log10(weakest), 0.0, 10000, dtype=torch.float64)
    for a, b, c in polynomials:
        singular = a * singular + b * singular**3 + c * singular**5
    assert low < singular.min() < singular.max() < 2.0 - low


@pytest.mark.parametrize("first_step", [0, 150, 298])
@pytest.mark.parametrize(("momentum", "heads"), [(0.95, 3), (0.5, 3), (0.95, 1)])
def test_muon_by_definition(first_step, momentum, heads):
    """Five steps on square, wide, tall and fused matrices equal the definition for each matrix or head.

    The learning rate is at its peak until it is set. A step with a rate of zero changes nothing.
    """
    config = OptimConfig(matrix_lr=0.03, lr=0.01, matrix_weight_decay=0.7, momentum=momentum)
    model = make_model(heads)
    start = values(model)
    optimizer = build_optimizer(dict(model.named_parameters()), heads, config, torch.float32)
    optimizer.param_groups[0]["step"] = first_step
    gradients = []
    for step, multiplier in enumerate(LR_MULTIPLIERS):
        gradients.append(set_gradients(model, step))
        before = values(model)
        if step:
            set_lr(optimizer, multiplier)
        optimizer.step()
        assert multiplier or all(torch.equal(value, before[name]) for name, value in values(model).items())
    assert optimizer.param_groups[0]["step"] == first_step + 5
    moved = values(model)
    for name in MATRICES:
        num_blocks = 3 * heads if "W_qkv" in name else 1
        gradients_by_block = zip(*(gradient[name].chunk(num_blocks) for gradient in gradients), strict=True)
        blocks = zip(start[name].chunk(num_blocks), gradients_by_block, strict=True)
        expected = [muon_by_definition(block, list(series), first_step, config) for block, series in blocks]
        assert (moved[name] - start[name]).abs().max() > 0.01, name
        torch.testing.assert_close(moved[name], torch.cat(expected), atol=1e-5, rtol=0.0)


def test_muon_without_gradients():
    """Matrices, rows and columns with zero gradients do not change, and nothing becomes nan."""
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
    """In bfloat16 a step is close to the step in fp32, but not equal."""
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
    """Train at changing learning rates. The gradients depend on the step only."""
    for step in steps:
        set_gradients(model, step)
        set_lr(optimizer, lr_multiplier(step, 11, OptimConfig(warmup_steps=3)))
        optimizer.step()


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_state_continues_bit_for_bit(name):
    """Training that continues from a saved state ends with the same weights. Without the state it does not."""
    uninterrupted = make_model()
    optimizer = make_optimizer(uninterrupted, name=name)
    continue_training(uninterrupted, optimizer, range(5))
    file = io.BytesIO()
    torch.save({"model": uninterrupted.state_dict(), "optimizer": optimizer.state_dict()}, file)
    continue_training(uninterrupted, optimizer, range(5, 11))

    ends = {}
    for with_state in (True, False):
        file.seek(0)
        checkpoint = torch.load(file, weights_only=True)
        model = make_model()
        model.load_state_dict(checkpoint["model"])
        optimizer = make_optimizer(model, name=name)
        if with_state:
            optimizer.load_state_dict(checkpoint["optimizer"])
        continue_training(model, optimizer, range(5, 11))
        ends[with_state] = values(model)
    expected = values(uninterrupted)
    assert all(torch.equal(value, ends[True][p]) for p, value in expected.items())
    assert not any(torch.equal(value, ends[False][p]) for p, value in expected.items())


def test_state_follows_the_parameters():
    """A state that was loaded on the CPU moves to the device of the parameters, because fused kernels need it there."""
    model = make_model()
    optimizer = make_optimizer(model)
    continue_training(model, optimizer, range(2))
    meta_optimizer = make_optimizer(make_model().to("meta"))
    meta_optimizer.load_state_dict(optimizer.state_dict())
    devices = {key: value.device.type for state in meta_optimizer.state.values() for key, value in state.items()}
    assert devices == {"step": "meta", "exp_avg": "meta", "exp_avg_sq": "meta", "momentum": "meta", "squares": "meta"}


# --- the configuration ---


@pytest.mark.parametrize(
    ("layers", "channels", "matrix_lr", "lr"),
    [(4, 128, 0.02, 0.006), (64, 512, 0.0025, 0.003), (2, 64, 0.02, 0.012), (1, 8, 0.02, 0.012)],
)
def test_default_learning_rates_are_scaled_to_the_model(layers, channels, matrix_lr, lr):
    """They depend on depth and width. Learning rates that the user chose do not change."""
    shape = ModelConfig(num_layers=layers, d_model=channels)
    config = OptimConfig().for_model(shape)
    assert (config.matrix_lr, config.lr) == pytest.approx((matrix_lr, lr))
    assert OptimConfig(matrix_lr=0.5, lr=0.25).for_model(shape) == OptimConfig(matrix_lr=0.5, lr=0.25)
