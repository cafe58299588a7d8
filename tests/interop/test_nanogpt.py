"""Checkpoints of nanoGPT: the same weights, the same loss but for GELU, and one line for what is no GPT-2."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import harness
from gpt import evaluate, export
from gpt.interop.nanogpt import NANOGPT_CHECKPOINT
from gpt.loading import find_checkpoint, open_model, open_tokenizer
from models import randomize

CONTEXT_LENGTH, D_MODEL, NUM_LAYERS, NUM_HEADS = 17, 22, 2, 2
NUM_TOKENS, PADDED = 50257, 50304
MODEL_ARGS = {"n_layer": NUM_LAYERS, "n_head": NUM_HEADS, "n_embd": D_MODEL, "block_size": CONTEXT_LENGTH}


class NanoLayerNorm(nn.Module):
    """nanoGPT's LayerNorm, whose bias is optional."""

    def __init__(self, width: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class NanoBlock(nn.Module):
    """A block with the names of nanoGPT's parameters, and the buffer that it has without flash attention."""

    def __init__(self, bias: bool, approximate: str):
        super().__init__()
        C, T = D_MODEL, CONTEXT_LENGTH
        self.approximate = approximate
        self.ln_1, self.ln_2 = NanoLayerNorm(C, bias), NanoLayerNorm(C, bias)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(C, 3 * C, bias), "c_proj": nn.Linear(C, C, bias)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(C, 4 * C, bias), "c_proj": nn.Linear(4 * C, C, bias)})
        self.attn.register_buffer("bias", torch.ones(T, T).tril().view(1, 1, T, T))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        parts = self.attn["c_attn"](self.ln_1(x)).split(C, dim=2)
        queries, keys, values = (part.view(B, T, NUM_HEADS, -1).transpose(1, 2) for part in parts)
        context = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.attn["c_proj"](context.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate=self.approximate))


class NanoGPT(nn.Module):
    """nanoGPT's GPT. Its GELU is the exact form, `approximate="none"`."""

    def __init__(self, bias: bool = True, approximate: str = "none", vocab_size: int = PADDED):
        super().__init__()
        parts = {"wte": nn.Embedding(vocab_size, D_MODEL), "wpe": nn.Embedding(CONTEXT_LENGTH, D_MODEL)}
        blocks = nn.ModuleList(NanoBlock(bias, approximate) for _ in range(NUM_LAYERS))
        self.transformer = nn.ModuleDict(parts | {"h": blocks, "ln_f": NanoLayerNorm(D_MODEL, bias)})
        self.lm_head = nn.Linear(D_MODEL, vocab_size, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight
        randomize(self, 0.3, 5)

    @torch.no_grad()
    def forward(self, idx: Tensor) -> Tensor:
        x = self.transformer["wte"](idx) + self.transformer["wpe"].weight[: idx.shape[1]]
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))[..., :NUM_TOKENS]


def save_nanogpt(model: NanoGPT, folder: Path, prefix: str = "", **model_args: Any) -> Path:
    """Write what nanoGPT's train.py writes into its out_dir, and return the file."""
    folder.mkdir(exist_ok=True)
    optimizer = torch.optim.AdamW(model.parameters())
    vocab_size = len(model.lm_head.weight)
    checkpoint = {
        "model": {prefix + name: weight for name, weight in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "model_args": MODEL_ARGS | {"vocab_size": vocab_size, "bias": True, "dropout": 0.0} | model_args,
        "iter_num": 7,
        "best_val_loss": torch.tensor(3.5),
        "config": {"out_dir": str(folder), "learning_rate": 6e-4, "compile": True},
    }
    torch.save(checkpoint, folder / NANOGPT_CHECKPOINT)
    return folder / NANOGPT_CHECKPOINT


@pytest.fixture(scope="module")
def out_dir(tmp_path_factory) -> Path:
    """An out_dir as nanoGPT leaves it: a padded vocabulary, and weights of a compiled model."""
    return save_nanogpt(NanoGPT(), tmp_path_factory.mktemp("nano") / "out", "_orig_mod.").parent


def random_tokens() -> Tensor:
    return torch.randint(NUM_TOKENS, (3, CONTEXT_LENGTH), generator=torch.Generator().manual_seed(11))


def loss(model: nn.Module, idx: Tensor) -> float:
    """Return the mean loss of a model, in nats per token."""
    with torch.no_grad():
        return float(F.cross_entropy(model(idx)[:, :-1].flatten(0, 1), idx[:, 1:].flatten()))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_weights_are_nanogpts(bias, prefix, tmp_path):
    """With tanh in nanoGPT's place of the exact GELU, the logits are equal. Absent biases are zeros."""
    reference = NanoGPT(bias, approximate="tanh")
    file = save_nanogpt(reference, tmp_path / "out", prefix, bias=bias)
    model, tokenizer = open_model(file)
    idx = random_tokens()
    torch.testing.assert_close(model(idx), reference(idx), rtol=1e-5, atol=1e-5)
    assert (model.config.vocab_size, tokenizer.name) == (NUM_TOKENS, "gpt2")
    assert open_tokenizer(str(file)).name == "gpt2"


def test_the_other_gelu_changes_the_loss_little(out_dir):
    """The weights of this test are large. A trained model changes less."""
    idx = random_tokens()
    difference = abs(loss(NanoGPT(), idx) - loss(open_model(out_dir)[0], idx))
    assert 1e-7 < difference < 1e-3


def test_one_line_names_the_other_gelu(out_dir, capsys):
    assert find_checkpoint(out_dir) == find_checkpoint(out_dir / "ckpt.pt") == out_dir / "ckpt.pt"
    open_model(out_dir)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{out_dir / 'ckpt.pt'} is a checkpoint of nanoGPT") and "GELU" in line
    open_model(out_dir, quiet=True)
    assert capsys.readouterr().err == ""


def test_it_is_evaluated(out_dir, tmp_path, capsys):
    """The table has the loss that the model has on the text."""
    text = tmp_path / "text.txt"
    text.write_text("The quiet river runs under the stone bridge.")
    evaluate.main(["--checkpoint", str(out_dir), "--text", str(text), "--json"])
    report = json.loads(capsys.readouterr().out)
    model, tokenizer = open_model(out_dir, quiet=True)
    idx = torch.tensor([[tokenizer.end_of_text, *tokenizer.encode(text.read_text())]])
    assert idx.shape[1] <= CONTEXT_LENGTH
    assert report["nats_per_token"] == pytest.approx(loss(model, idx), rel=1e-5)
    evaluation = harness.refusal(evaluate.main, ["--checkpoint", str(out_dir)])
    assert evaluation.endswith("give a text with --text")


@pytest.mark.slow
def test_an_export_names_the_gelu_that_the_weights_were_trained_with(out_dir, tmp_path):
    """Unchanged weights keep the exact form. A run that was trained from them has the form with tanh."""
    export.main(["--checkpoint", str(out_dir), "--to", str(tmp_path / "exact")])
    exact = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exact").eval()
    assert exact.config.activation_function == "gelu"
    idx = random_tokens()
    torch.testing.assert_close(exact(idx).logits, NanoGPT()(idx), rtol=1e-5, atol=1e-5)

    corpus = harness.write_corpus(tmp_path)
    settings = ["horizon=2steps", "trainer.tokens_per_step=102", "trainer.micro_batch_size=3", f"data.path={corpus}"]
    done = harness.train(f"init_from={out_dir}", f"run_dir={tmp_path / 'run'}", f"data.cache={tmp_path}", *settings)
    assert done.stderr.count("a checkpoint of nanoGPT") == 1
    export.main(["--checkpoint", str(tmp_path / "run"), "--to", str(tmp_path / "tuned")])
    config = json.loads((tmp_path / "tuned/config.json").read_text())
    assert config["activation_function"] == "gelu_new"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vocab_size": 65}, "its vocab_size is 65, and GPT-2's tokenizer has 50,257 tokens"),
        ({"vocab_size": 50258}, "its vocab_size is 50258"),
        ({"vocab_size": "50304"}, "its vocab_size is '50304'"),
        ({"n_layer": 3}, "it has no 'h.2.ln_1.weight'"),
        ({"n_layer": 1}, "it has 'h.1.ln_1.weight'"),
        ({"n_head": 3}, "model.d_model=22 is not divisible by model.num_heads=3"),
        ({"n_embd": 23.5}, "its d_model is 23.5"),
        ({"block_size": 19}, "its configuration describes 1,118,304 weights"),
    ],
)
def test_other_models_are_refused_in_one_line(changes, reason, tmp_path):
    """A vocabulary of nanoGPT's meta.pkl is another one."""
    file = save_nanogpt(NanoGPT(vocab_size=67 if changes.get("vocab_size") == 65 else PADDED), tmp_path, **changes)
    line = harness.refusal(open_model, file)
    assert line.startswith(f"{file}: ") and reason in line


def test_weights_without_a_place_are_refused(tmp_path):
    """A fork of nanoGPT with more weights computes something else."""
    model = NanoGPT()
    model.transformer["h"][1].attn.register_parameter("q_norm", nn.Parameter(torch.ones(3)))
    assert "it has 'h.1.attn.q_norm', which is no weight of a GPT-2" in harness.refusal(
        open_model, save_nanogpt(model, tmp_path)
    )
    model = NanoGPT()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight + 1)
    assert "its lm_head.weight is another than" in harness.refusal(open_model, save_nanogpt(model, tmp_path))
