"""Exported folders: `transformers` says in them what we say, and they come back bit for bit."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file

import harness
import model_files
from gpt import export
from gpt.data.tokenizer import Tokenizer, byte_tokenizer, train_bpe
from gpt.interop import huggingface
from gpt.loading import open_model
from gpt.model.transformer import GPT, ModelConfig

TEXT = "It's 1,234 naïve cafés, don't you think?\n\n\tself.x  =  3 # 世界 🙂\r\nthe theme there, thethethe    \n"
ODD = ModelConfig(context_length=97, d_model=60, num_layers=3, num_heads=5)
BPE = train_bpe([TEXT * 3], 307)

transformers.logging.disable_progress_bar()


def write_run(folder: Path, shape: ModelConfig = ODD, tokenizer: Tokenizer = BPE, **record) -> GPT:
    """Write a run whose every weight is random, and return its model."""
    return model_files.write_run(folder, shape, tokenizer=tokenizer, record=record, seed=29, scale=0.1)


def run(*arguments: object) -> None:
    """Run the command in this process."""
    export.main([str(argument) for argument in arguments])


def refusal(*arguments: object) -> str:
    """The one line with which the command refuses."""
    return harness.refusal(run, *arguments)


def open_theirs(folder: Path) -> transformers.GPT2LMHeadModel:
    """The model as their users open it."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def listing(folder: Path) -> list[str]:
    """Everything below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """A folder that holds a run and what was exported of it."""
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
    [(BPE, {}), (byte_tokenizer(), {}), (BPE, {"qkv_bias": False})],
    ids=["bpe", "byte", "no-bias"],
)
def test_there_and_back(tmp_path, capsys, tokenizer, changes):
    """An odd shape: their logits and ids are ours, and what comes back is the same to the last bit."""
    model = write_run(tmp_path / "run", ModelConfig(**(asdict(ODD) | changes)), tokenizer)
    run("--checkpoint", tmp_path / "run", "--to", tmp_path / "out")
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")(TEXT).input_ids
    assert ids == tokenizer.encode(TEXT)
    idx, expected = torch.tensor([ids[:97]]), model(torch.tensor([ids[:97]]))
    assert expected.std() > 0.5
    torch.testing.assert_close(open_theirs(tmp_path / "out")(idx).logits, expected, atol=1e-4, rtol=0.0)
    again, same = open_model(tmp_path / "out")
    assert (again.config, same.to_dict()) == (model.config, tokenizer.to_dict())
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(again.state_dict()[name], weight) for name, weight in model.state_dict().items())
    assert "the weights come back bit for bit; logits at" in capsys.readouterr().out


@pytest.mark.slow
def test_pipeline(exported):
    """`pipeline` takes the folder as it is, and stops before the positions run out."""
    pipeline = transformers.pipeline("text-generation", model=str(exported / "out"))
    assert pipeline("It's")[0]["generated_text"].startswith("It's")
    ids = pipeline("It's", return_tensors=True)[0]["generated_token_ids"]
    assert len(ids) == 97 or ids[-1] == BPE.end_of_text


# --- what the folder holds, and what is said ---


def test_files(exported):
    """The usual files, which everybody may read who may read the others, and none of them a program."""
    names = "README.md config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json"
    files = sorted((exported / "out").iterdir())
    assert [file.name for file in files] == names.split()
    assert len({file.stat().st_mode for file in files}) == 1
    config = json.loads((exported / "out/config.json").read_text())
    assert (config["n_ctx"], config["n_positions"], config["eos_token_id"]) == (97, 97, BPE.end_of_text)
    assert sorted(path.name for path in exported.iterdir()) == ["out", "run"]


def test_card(exported, tmp_path, capsys):
    """What the hub reads of it, with the figures of the run; and how to upload it."""
    from huggingface_hub import ModelCard

    card = ModelCard.load(exported / "out/README.md")
    assert (card.data.library_name, card.data.pipeline_tag, card.data.tags) == (
        "transformers",
        "text-generation",
        ["gpt2"],
    )
    assert card.data.eval_results is None and card.data.license is None
    assert "A GPT-2 with " in card.text and "Trained on" not in card.text  # the run has no figures
    record = {"data": {"name": "text", "path": "/home/me/novel.txt"}}
    write_run(tmp_path / "run")
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump(record))
    figures = {"steps": 4000, "epochs": 4.4, "val_loss": 3.0, "best_val_loss": 2.4, "val_bits_per_byte": 2.0}
    (tmp_path / "run/metrics.json").write_text(json.dumps(figures))
    run("--checkpoint", tmp_path / "run", "--to", tmp_path / "my novel")
    card = ModelCard.load(tmp_path / "my novel/README.md")
    [result] = card.data.eval_results
    assert (result.dataset_name, result.metric_type, result.metric_value) == (
        "novel.txt, held out",
        "bits_per_byte",
        1.6,
    )
    assert "Trained on novel.txt, of which it needs 1.6 bits per byte on a part" in card.text
    assert "/home/me" not in (tmp_path / "my novel/README.md").read_text()
    assert f"share it: hf upload 'my novel' '{tmp_path}/my novel', once" in capsys.readouterr().out


def test_without_transformers(trained, monkeypatch):
    """What cannot be compared is not written, and one line says what to install."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    line = refusal("--checkpoint", trained, "--to", trained.parent / "out")
    assert line == "comparing logits needs transformers: pip install transformers"


def test_from_huggingface_to_gguf(exported, tmp_path, capsys):
    """A name that ends in .gguf makes such a file, of any model that can be opened."""
    run("--checkpoint", exported / "out", "--to", tmp_path / "model.gguf", "--type", "f16")
    assert (tmp_path / "model.gguf").read_bytes()[:4] == b"GGUF"
    assert f"as f16: {tmp_path / 'model.gguf'}" in capsys.readouterr().out


# --- what is refused ---


def test_differences_are_noticed(trained, monkeypatch):
    """Logits, ids or bits that differ from the model's: one line, and nothing is left beside the run."""
    arguments = ("--checkpoint", trained, "--to", trained.parent / "out")
    write, before = huggingface.write_huggingface, listing(trained.parent)

    def spoil(change):
        def spoilt(model, tokenizer, folder):
            write(model, tokenizer, folder)
            change(folder)

        monkeypatch.setattr(huggingface, "write_huggingface", spoilt)

    def swap_two_tokens(folder: Path) -> None:
        stored = json.loads((folder / "tokenizer.json").read_text())
        vocab = stored["model"]["vocab"]
        vocab["a"], vocab["e"] = vocab["e"], vocab["a"]
        (folder / "tokenizer.json").write_text(json.dumps(stored))

    def change_a_bit(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        weights["transformer.h.2.mlp.c_proj.bias"][7] *= 1 + 2**-23
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    def change_the_formula(folder: Path) -> None:
        stored = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(stored | {"activation_function": "gelu"}))
        monkeypatch.setattr(export, "compare_weights", lambda *_: "")  # which would refuse it before

    for change, reason in (
        (swap_two_tokens, "the exported tokenizer tokenizes differently"),
        (change_a_bit, "the exported weights or tokens are not the same when they are read back"),
        (change_the_formula, f"logits at 970 positions in transformers {transformers.__version__} differ by "),
    ):
        spoil(change)
        assert refusal(*arguments).startswith(reason)
        assert listing(trained.parent) == before


def test_out_of_memory(trained, tmp_path, capsys, monkeypatch):
    """If memory runs out, that is said in one line, and nothing is left."""

    def fail(*arguments: object, **options: object) -> None:
        raise MemoryError

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    told = harness.command_refusal(capsys, "gpt.export", "--checkpoint", trained, "--to", tmp_path / "out")
    assert told == "gpt.export: memory has run out: choose a machine with more, or close other programs"
    assert not [name for name in listing(tmp_path) if "out" in name.split("/")[0]]


def test_two_at_once(trained, monkeypatch):
    """The slower one says in one line that the name is taken, and leaves nothing and what is there as it is."""
    out, write = trained.parent / "out", huggingface.write_huggingface

    def overtaken(*arguments) -> None:
        monkeypatch.setattr(huggingface, "write_huggingface", write)
        run("--checkpoint", trained, "--to", out)
        write(*arguments)

    monkeypatch.setattr(huggingface, "write_huggingface", overtaken)
    line = refusal("--checkpoint", trained, "--to", out)
    assert line == f"--to={out} exists already: give another name, or move it away first"
    assert sorted(path.name for path in trained.parent.iterdir()) == ["out", "run"]
    assert open_model(out)


def test_refusals(trained, monkeypatch):
    """One line each, before a model is loaded; nothing is written and what exists stays."""
    folder = trained.parent
    (folder / "file").write_text("2 3 5 7")
    (folder / "dangling").symlink_to("nowhere")
    before = listing(folder)
    monkeypatch.setattr(export, "open_model", lambda path: pytest.fail("loaded"))
    for target in ("file", "run", "dangling", "../" + folder.name):
        assert refusal("--to", folder / target) == (
            f"--to={folder / target} exists already: give another name, or move it away first"
        )
    missing = folder / "no/where"
    assert refusal("--to", missing) == f"--to={missing}: there is no folder {missing.parent}: make it first"
    assert refusal("--to", folder / "file/out").startswith(f"--to={folder / 'file/out'}: there is no folder")
    line = "--type=f16 is for .gguf files, and the weights of a folder stay fp32: leave it out"
    assert refusal("--to", folder / "out", "--type", "f16") == line
    assert "invalid choice: 'int3'" in refusal("--to", folder / "out.gguf", "--type", "int3")
    assert "required: --to" in refusal()
    assert refusal("--checkpoint", folder / "none", "--to", folder / "out").startswith(
        f"{folder / 'none'}: there is no"
    )
    assert listing(folder) == before


def test_full_disk(trained):
    """safetensors has an error of its own for it, which becomes one line; nothing stays."""
    before = listing(trained.parent)
    with model_files.limit_file_size(100_000):
        line = refusal("--checkpoint", trained, "--to", trained.parent / "out")
    assert "the weights cannot be written" in line
    assert listing(trained.parent) == before
