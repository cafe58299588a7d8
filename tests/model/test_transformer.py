"""The model equals `transformers`' GPT2LMHeadModel, published sizes and hand counts."""

import copy
import dataclasses
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import GPT2LMHeadModel

import models
from gpt.data.batches import validation_batches
from gpt.interop.huggingface import from_huggingface_weights, to_huggingface_weights
from gpt.model.fast.chunked_loss import chunked_next_token_loss
from gpt.model.loss import IGNORE_INDEX
from gpt.model.transformer import GPT, GPTConfig
from gpt.sampling.scoring import score
from gpt.training.optim import OptimConfig, build_optimizer
from harness import refusal

VOCAB, CONTEXT, HEADS, LAYERS = 101, 13, 3, 5
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="SKIPPED LOUDLY: there is no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
D_MODEL = HEADS * 7


def make_config(**changes) -> GPTConfig:
    """Return a small shape. Every size is a prime or a multiple of one."""
    shape = GPTConfig(CONTEXT, D_MODEL, LAYERS, HEADS, vocab_size=VOCAB)
    return dataclasses.replace(shape, **changes)


def make_model(**changes) -> GPT:
    """Return a small model. Every parameter, including biases and gains, is random and large enough to matter."""
    return models.random_model(make_config(**changes), std=0.2, unit_embeddings=False)


def make_idx(T: int) -> Tensor:
    return models.make_idx(VOCAB, 2, T)


@pytest.fixture(scope="module")
def twins() -> tuple[GPT, GPT2LMHeadModel]:
    """Return a small model and its twin from `transformers`, with the same weights."""
    reference = models.gpt2_twin(make_config())
    weights = from_huggingface_weights(reference.state_dict(), LAYERS)
    return GPT.from_state_dict(make_config(), weights).eval(), reference


def in_their_layout(model: GPT) -> dict[str, Tensor]:
    """Return every weight of GPT2LMHeadModel, including the tied head."""
    weights = to_huggingface_weights(model)
    return weights | {"lm_head.weight": weights["transformer.wte.weight"]}


@pytest.mark.parametrize("T", [1, 7, CONTEXT])
@torch.no_grad()
def test_logits_equal_transformers(twins, T):
    """The same weights give the same logits."""
    model, reference = twins
    idx = make_idx(T)
    expected = reference(idx).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(model(idx), expected, atol=1e-4, rtol=0.0)


def test_gradients_equal_transformers(twins):
    """The next-token loss and its gradient in every parameter are the same too."""
    model, reference = twins
    idx = make_idx(CONTEXT)
    model.zero_grad()
    reference.zero_grad()
    loss = F.cross_entropy(model(idx[:, :-1]).flatten(0, 1), idx[:, 1:].flatten())
    expected_loss = reference(idx, labels=idx).loss
    loss.backward()
    expected_loss.backward()
    torch.testing.assert_close(loss, expected_loss, atol=1e-5, rtol=0.0)
    gradients = copy.deepcopy(model)
    for copied, parameter in zip(gradients.parameters(), model.parameters(), strict=True):
        copied.data = parameter.grad
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    actual = {name: gradient for name, gradient in in_their_layout(gradients).items() if name in expected}
    assert all(gradient.abs().max() > 1e-3 for gradient in actual.values())
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0.0)


def test_attention_maps_equal_transformers(twins):
    """The attention weights of each layer and head are the same."""
    model, reference = twins
    maps = model.attention_maps(make_idx(7))
    assert not maps.requires_grad
    with torch.no_grad():
        expected = torch.stack(reference(make_idx(7), output_attentions=True).attentions, dim=1)
    torch.testing.assert_close(maps, expected, atol=1e-5, rtol=0.0)


def test_init_statistics():
    """`init_weights` draws every parameter as it documents, and overwrites earlier values."""
    torch.manual_seed(19)
    config = make_config(d_model=91, num_heads=7, num_layers=3, vocab_size=211, context_length=97)
    model = GPT(config)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 5.0)
    model.init_weights()
    parameters = dict(model.named_parameters())
    assert len(parameters) == 2 + 3 * 12 + 2
    for name, parameter in parameters.items():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif parameter.dim() == 1:
            assert (parameter == 1).all(), name
        else:
            std = 0.02 / math.sqrt(6) if "out_proj" in name or "contract" in name else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name
            assert parameter.mean().item() == pytest.approx(0.0, abs=0.05 * std), name
            beyond = (parameter.abs() > 2 * std).float().mean().item()
            assert beyond == pytest.approx(0.0455, abs=0.01), name  # as in a normal distribution


def test_a_state_dict_is_used_without_copying():
    """Nothing is drawn, and only tensors of another precision are copied."""
    model, idx = make_model(), make_idx(5)
    state = model.state_dict()
    generator = torch.get_rng_state()
    again = GPT.from_state_dict(model.config, state)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(p.requires_grad and p.data_ptr() == state[name].data_ptr() for name, p in again.named_parameters())
    assert all(torch.equal(*masks) for masks in zip(again.buffers(), model.buffers(), strict=True))
    assert torch.equal(again(idx), model(idx))
    halves = {name: tensor.bfloat16() for name, tensor in state.items()}
    assert {p.dtype for p in GPT.from_state_dict(model.config, halves).parameters()} == {torch.float32}


def test_head_is_tied():
    """The output head is the token embedding itself: one parameter, saved once."""
    model = make_model()
    idx = make_idx(7)
    assert not [name for name in model.state_dict() if "head" in name]
    for other in (model, make_model(qkv_bias=False)):
        assert sum(tensor.numel() for tensor in other.state_dict().values()) == other.config.num_parameters
    absent = next(v for v in range(VOCAB) if v not in idx)
    model(idx).square().mean().backward()
    assert model.token_embedding.weight.grad[absent].abs().max() > 0  # only through the head


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.slow
def test_compiled_once(checkpointing):
    """All blocks share one graph, compiled once with gradients and once without.

    The order of training, validation and samples does not matter.
    """
    model, idx = make_model().set_compute_dtype(torch.bfloat16).train(), make_idx(CONTEXT)
    model.checkpointing = checkpointing
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.blocks:
        block.compile(backend=counter, fullgraph=True)
    text = idx.flatten().repeat(4)[: 6 * CONTEXT + 2].numpy()  # seven sequences: the last batch has one
    counts = []
    for _ in range(3):
        for _ in range(2):
            chunked_next_token_loss(*model.features_and_head(idx), idx).backward()
        counts.append(counter.frame_count)
        score(model, validation_batches(text, 3, CONTEXT, IGNORE_INDEX), num_bytes=1)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # as in the samples of a run
            model.eval().forward_features(idx[:1, :7])
        model.train()
        counts.append(counter.frame_count)
    assert counts == [1, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("fused", [True, False])
def test_no_cpu_tensor_on_another_device(name, fused):
    """Training and sampling on the meta device, which has shapes but no numbers, use no CPU tensor.

    The code takes the route of a GPU there.
    """
    model = make_model().set_compute_dtype(torch.bfloat16).to("meta")
    for block in model.blocks:
        block.attention.fused_kernel = fused
    parameters = dict(model.named_parameters())
    optimizer = build_optimizer(parameters, HEADS, OptimConfig(name, 0.02, lr=0.006), torch.bfloat16)
    idx = make_idx(CONTEXT).to("meta")
    for model.checkpointing in (False, True):
        loss = chunked_next_token_loss(*model.features_and_head(idx), idx)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters.values()])
        torch.nn.utils.clip_grads_with_norm_(parameters.values(), 1.0, norm)
        optimizer.step()
        optimizer.zero_grad()
        assert (loss.device.type, loss.dtype, norm.device.type) == ("meta", torch.float32, "meta")
    caches, starts = model.init_kv_caches(), torch.zeros(len(idx), dtype=torch.long, device="meta")
    with torch.no_grad():
        for tokens in (idx[:, :-1], idx[:, -1:]):
            assert model.head(model.forward_features(tokens, caches, starts)).shape == (*tokens.shape, VOCAB)
    assert model.attention_maps(idx).device.type == "meta"


def test_short_sequences_have_all_positions():
    """Each of three rows has the next positions of the context."""
    model, T = make_model(), CONTEXT // 3
    idx = make_idx(T).repeat(3, 1)
    hidden, _ = model.features_and_head(idx, num_offsets=3)
    positions = model.position_embedding.weight.detach().clone()
    for row in range(3):
        with torch.no_grad():
            model.position_embedding.weight[:T] = positions[row * T : (row + 1) * T]
        torch.testing.assert_close(hidden[row::3], model.forward_features(idx)[row::3])


@pytest.mark.parametrize("device", DEVICES)
def test_features_and_head(device):
    """The training loss has the plain value and gradients, also for repeated tokens and the head.

    Gradients may be returned or accumulated.
    """
    model = make_model().to(device)
    idx, targets = make_idx(CONTEXT).to(device), make_idx(CONTEXT).flip(1).to(device)
    assert idx.unique().numel() < idx.numel()
    expected_loss = F.cross_entropy(model(idx).flatten(0, 1), targets.flatten())
    expected = torch.autograd.grad(expected_loss, list(model.parameters()))

    def loss() -> Tensor:
        return chunked_next_token_loss(*model.features_and_head(idx), targets)

    torch.testing.assert_close(loss(), expected_loss)
    torch.testing.assert_close(torch.autograd.grad(loss(), list(model.parameters())), expected, atol=1e-6, rtol=1e-4)
    for times in (1, 2):
        loss().backward()
        gradients = tuple(p.grad / times for p in model.parameters())
        torch.testing.assert_close(gradients, expected, atol=1e-6, rtol=1e-4)


def test_too_long_input_is_refused():
    """The error names the length and the limit, for an input alone and for an input after cached tokens."""
    model = make_model()
    with pytest.raises(ValueError, match=r"\b17 tokens .*\b13\b"):
        model(make_idx(17))
    with pytest.raises(ValueError, match=r"\b17 tokens .*\b13\b"):
        model.attention_maps(make_idx(17))
    caches = model.init_kv_caches()
    model(make_idx(11), caches)
    with pytest.raises(ValueError, match=r"\b14 tokens .*\b13\b"):
        model(make_idx(3), caches)
    assert caches[0].length == 11
    assert model(make_idx(2), caches).shape == (2, 2, VOCAB)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": -7}, r"d_model=-7 .*at least 1"),
        ({"num_heads": 0}, r"num_heads=0 .*at least 1"),
        ({"d_model": 10, "num_heads": 3}, r"d_model=10 .*num_heads=3.*d_model=12"),
        ({"dropout": 1.0}, r"dropout=1.0 .*at least 0 and below 1"),
        ({"dropout": math.nan}, r"dropout=nan .*at least 0 and below 1"),
    ],
)
def test_config_ranges(changes, message):
    """The error names the value and the limit. The smallest model runs."""
    assert re.search(message, refusal(GPTConfig, **changes))
    smallest = GPTConfig(context_length=1, d_model=1, num_layers=1, num_heads=1, vocab_size=1)
    assert GPT(smallest)(torch.zeros(1, 1, dtype=torch.long)).shape == (1, 1, 1)


def test_dropout_is_for_training():
    """Two passes differ in training. In evaluation they equal a model without dropout."""
    model, idx = make_model(dropout=0.3), make_idx(7)
    torch.testing.assert_close(model(idx), make_model()(idx), atol=0.0, rtol=0.0)
    model.train()
    torch.manual_seed(23)
    assert (model(idx) - model(idx)).abs().max() > 1e-2
    assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} == {0.3}


def test_flops_per_token():
    """The count by hand of a small model."""
    config = GPTConfig(context_length=7, d_model=6, num_layers=2, num_heads=3, vocab_size=11)
    head = 11 * 6
    block = 6 * 18 + 6 * 6 + 6 * 24 + 24 * 6  # queries, keys and values; output; expand; contract
    scores_and_mixing = 2 * 5 * 6  # each of five tokens has one product of 6 with a key and one with a value
    assert config.costs().flops_per_token(5) == 6 * (head + 2 * block + 2 * scores_and_mixing) == 6300


def test_a_model_too_large_for_pytorch_is_refused():
    assert "d_model=1099511627776" in refusal(GPTConfig(d_model=2**40, num_heads=1).costs)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointing(dropout):
    """Recomputed activations give the same gradients, bit for bit, and take less memory."""
    num_stored, gradients = [], []
    for checkpointing in (False, True):
        model = make_model(dropout=dropout).train()
        model.checkpointing = checkpointing
        storages = set()

        def keep(tensor: Tensor, storages=storages) -> Tensor:
            storages.add(tensor.untyped_storage().data_ptr())
            return tensor

        torch.manual_seed(3)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(make_idx(5)).square().mean()
        loss.backward()
        num_stored.append(len(storages))
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
    assert num_stored[1] < num_stored[0] / 2
