"""Exported folders give the same results in `transformers`, and come back bit for bit."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

import harness
import models
from gpt import export
from gpt.data.tokenizer import Tokenizer, byte_tokenizer, train_bpe
from gpt.interop.huggingface import write_huggingface
from gpt.loading import open_model
from gpt.model.transformer import GPT, ModelConfig

TEXT = "It's 1,234 naïve cafés, don't you think?\n\n\tself.x  =  3 # 世界 🙂\r\nthe theme there, thethethe    \n"
ODD_SHAPE = ModelConfig(context_length=97, d_model=60, num_layers=3, num_heads=5)
BPE = train_bpe([TEXT * 3], 307)

transformers.logging.disable_progress_bar()


def write_run(folder: Path, shape: ModelConfig = ODD_SHAPE, tokenizer: Tokenizer = BPE) -> GPT:
    """Write a run whose weights are all random, and return its model."""
    model = models.small_model(shape, tokenizer)
    models.write_run(folder, model, tokenizer)
    return model


def run(*arguments: object) -> None:
    """Run the command in this process."""
    export.main([str(argument) for argument in arguments])


def refusal(*arguments: object) -> str:
    return harness.refusal(run, *arguments)


def list_files(folder: Path) -> list[str]:
    """Return the paths of everything below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """A folder with a run and its export."""
    folder = tmp_path_factory.mktemp("export")
    write_run(folder / "run")
    run("--checkpoint", folder / "run", "--to", folder / "out")
    return folder


@pytest.fixture
def trained(tmp_path) -> Path:
    """A run to export."""
    write_run(tmp_path / "run")
    return tmp_path / "run"


# --- both directions ---


@torch.no_grad()
@pytest.mark.parametrize(
    ("tokenizer", "changes"),
    [(byte_tokenizer(), {}), (BPE, {"qkv_bias": False})],
    ids=["byte", "bpe, no bias"],
)
def test_transformers_computes_the_same_and_the_model_comes_back(tmp_path, capsys, tokenizer, changes):
    out = tmp_path / "out"
    model = write_run(tmp_path / "run", ModelConfig(**(asdict(ODD_SHAPE) | changes)), tokenizer)
    run("--checkpoint", tmp_path / "run", "--to", out)
    ids = transformers.AutoTokenizer.from_pretrained(out)(TEXT).input_ids
    assert ids == tokenizer.encode(TEXT)
    idx = torch.tensor([ids[:97]])
    logits = model(idx)
    assert logits.std() > 0.5
    gpt2 = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    torch.testing.assert_close(gpt2(idx).logits, logits, atol=1e-4, rtol=0.0)
    loaded_model, loaded_tokenizer = open_model(out)
    assert (loaded_model.config, loaded_tokenizer.to_dict()) == (model.config, tokenizer.to_dict())
    state = loaded_model.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], weight) for name, weight in model.state_dict().items())
    assert "the weights come back bit for bit; logits at" in capsys.readouterr().out


@pytest.mark.slow
def test_pipeline_generates_until_the_context_is_full(exported):
    pipeline = transformers.pipeline("text-generation", model=str(exported / "out"))
    assert pipeline("It's")[0]["generated_text"].startswith("It's")
    ids = pipeline("It's", return_tensors=True)[0]["generated_token_ids"]
    assert len(ids) == 97 or ids[-1] == BPE.end_of_text


# --- the files ---


def test_files_have_one_mode_and_no_code(exported):
    names = "README.md config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json"
    files = sorted((exported / "out").iterdir())
    assert [file.name for file in files] == names.split()
    assert len({file.stat().st_mode for file in files}) == 1
    config = json.loads((exported / "out/config.json").read_text())
    assert (config["n_ctx"], config["n_positions"], config["eos_token_id"]) == (97, 97, BPE.end_of_text)
    assert sorted(path.name for path in exported.iterdir()) == ["out", "run"]


def test_the_hub_reads_the_model_card(exported, trained, tmp_path, capsys):
    """It has the figures of the run, if any. The text is named without its folder.

    The command prints how to upload the model.
    """
    card = ModelCard.load(exported / "out/README.md")
    data = card.data
    assert (data.library_name, data.pipeline_tag, data.tags) == ("transformers", "text-generation", ["gpt2"])
    assert data.eval_results is None
    assert data.license is None
    assert "A GPT-2 with " in card.text
    assert "Trained on" not in card.text
    config = {"data": {"name": "text", "path": "/home/me/novel.txt"}}
    (trained / "config.yaml").write_text(yaml.safe_dump(config))
    metrics = {"steps": 4000, "epochs": 4.4, "val_loss": 3.0, "best_val_loss": 2.4, "val_bits_per_byte": 2.0}
    (trained / "metrics.json").write_text(json.dumps(metrics))
    run("--checkpoint", trained, "--to", tmp_path / "my novel")
    card = ModelCard.load(tmp_path / "my novel/README.md")
    [result] = card.data.eval_results
    assert (result.dataset_name, result.metric_type, result.metric_value) == (
        "novel.txt, held out",
        "bits_per_byte",
        1.6,
    )
    assert "1.6 bits per byte" in card.text
    assert "/home/me" not in (tmp_path / "my novel/README.md").read_text()
    assert f"share it: hf upload 'my novel' '{tmp_path}/my novel', once" in capsys.readouterr().out


def test_a_model_card_may_have_a_loss_of_zero(trained, tmp_path):
    (trained / "config.yaml").write_text(yaml.safe_dump({"data": {"name": "text", "path": "letter.txt"}}))
    (trained / "metrics.json").write_text(json.dumps({"val_loss": 0.0, "best_val_loss": 0.0, "val_bits_per_byte": 0.0}))
    run("--checkpoint", trained, "--to", tmp_path / "out")
    [result] = ModelCard.load(tmp_path / "out/README.md").data.eval_results
    assert result.metric_value == 0.0


def test_a_huggingface_folder_becomes_a_gguf_file(exported, tmp_path, capsys):
    run("--checkpoint", exported / "out", "--to", tmp_path / "model.gguf", "--type", "f16")
    assert (tmp_path / "model.gguf").read_bytes()[:4] == b"GGUF"
    assert f"as f16: {tmp_path / 'model.gguf'}" in capsys.readouterr().out


# --- what is refused ---


def swap_two_tokens(folder: Path) -> None:
    stored = json.loads((folder / "tokenizer.json").read_text())
    vocab = stored["model"]["vocab"]
    vocab["a"], vocab["e"] = vocab["e"], vocab["a"]
    (folder / "tokenizer.json").write_text(json.dumps(stored))


def flip_a_bit(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["transformer.h.2.mlp.c_proj.bias"][7] *= 1 + 2**-23
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def change_the_formula(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"activation_function": "gelu"}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (swap_two_tokens, "the exported tokenizer tokenizes differently"),
        (flip_a_bit, "the exported weights or tokens are not the same when they are read back"),
        (change_the_formula, f"logits at 970 positions in transformers {transformers.__version__} differ by "),
    ],
)
def test_an_export_that_differs_is_not_written(trained, monkeypatch, damage: Callable[[Path], None], reason):
    def write_damaged(model, tokenizer, folder):
        write_huggingface(model, tokenizer, folder)
        damage(folder)

    files = list_files(trained.parent)
    monkeypatch.setattr(export, "write_huggingface", write_damaged)
    if damage is change_the_formula:
        monkeypatch.setattr(export, "compare_weights", lambda *_: "")  # it would refuse this configuration
    assert refusal("--checkpoint", trained, "--to", trained.parent / "out").startswith(reason)
    assert list_files(trained.parent) == files


def test_without_transformers_nothing_is_written(trained, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    line = refusal("--checkpoint", trained, "--to", trained.parent / "out")
    assert line == "comparing logits needs transformers: pip install transformers"
    assert not (trained.parent / "out").exists()


def test_a_lack_of_memory_or_disk_leaves_nothing(trained, capsys, monkeypatch):
    """It is one line. safetensors has its own error for a full disk."""

    def fail(*arguments: object, **options: object) -> None:
        raise MemoryError

    files = list_files(trained.parent)
    arguments = ["--checkpoint", trained, "--to", trained.parent / "out"]
    with models.limit_file_size(100_000):
        assert "the weights cannot be written" in refusal(*arguments)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    line = harness.command_refusal(capsys, "gpt.export", *arguments)
    assert line == "gpt.export: memory has run out: choose a machine with more, or close other programs"
    assert list_files(trained.parent) == files


def test_of_two_exports_at_once_the_second_is_refused(trained, monkeypatch):
    """Another process takes the name while this one writes."""
    out = trained.parent / "out"

    def write_after_another_export(*arguments) -> None:
        monkeypatch.setattr(export, "write_huggingface", write_huggingface)
        run("--checkpoint", trained, "--to", out)
        write_huggingface(*arguments)

    monkeypatch.setattr(export, "write_huggingface", write_after_another_export)
    line = refusal("--checkpoint", trained, "--to", out)
    assert line == f"--to={out} exists already: give another name, or move it away first"
    assert sorted(path.name for path in trained.parent.iterdir()) == ["out", "run"]
    assert open_model(out)


def test_mistakes_are_refused_before_a_model_is_loaded(trained, monkeypatch):
    """Nothing is written, and existing files stay."""
    folder = trained.parent
    (folder / "file").write_text("2 3 5 7")
    (folder / "dangling").symlink_to("nowhere")
    files = list_files(folder)
    monkeypatch.setattr(export, "open_checkpoint", lambda path: pytest.fail("loaded"))
    for name in ("file", "run", "dangling", "../" + folder.name):
        line = f"--to={folder / name} exists already: give another name, or move it away first"
        assert refusal("--to", folder / name) == line
    for name in ("no/where", "file/out"):
        target = folder / name
        assert refusal("--to", target) == f"--to={target}: there is no folder {target.parent}: make it first"
    line = "--type=f16 is for .gguf files, and the weights of a folder stay fp32: leave it out"
    assert refusal("--to", folder / "out", "--type", "f16") == line
    missing = folder / "missing"
    assert refusal("--checkpoint", missing, "--to", folder / "out").startswith(f"{missing}: there is no")
    assert list_files(folder) == files
