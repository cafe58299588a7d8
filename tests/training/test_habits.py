"""Keys of nanoGPT, Hugging Face and Lightning get one line that says what to write here, with the user's numbers."""

import re
import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from gpt.errors import UserError
from gpt.training import habits
from gpt.training.config import Config, keys_of, to_plain, validate
from gpt.training.habits import advice, leaves, quoted, rewritten
from harness import train

OURS = keys_of(Config)
TOKENS = "trainer.tokens_per_step"


def told(*arguments: str) -> str:
    """The one line with which train.py refuses these arguments."""
    done = train(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("train.py: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def advised(**values: object) -> str:
    return advice(to_plain(Config()) | values, OURS)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["max_iters=5000"], "there is no key 'max_iters' (nanoGPT): horizon=5000steps"),
        (["batch_size=12"], f"'batch_size' (nanoGPT): {TOKENS}=1536, which is 12 sequences x model.context_length=128"),
        (["++data.batch_size=3", "experiment=gpt2_small"], f"{TOKENS}=3072, which is 3 sequences x"),
        (["--batch_size", "12", "model.context_length=64"], f"{TOKENS}=768, which is 12 sequences x"),
        (
            ["seed=3", "-m", "n_layer=2,3"],
            "job 0 (seed=3 ++n_layer=2): there is no key 'n_layer' (nanoGPT): model.num_layers=2",
        ),
        (["--nonsense", "3"], "there is no key 'nonsense'; see configs/"),
    ],
)
def test_command_line(arguments, line):
    """Bare, with a group, with plus signs, with dashes, and in a sweep; the composed context length counts."""
    assert line in told(*arguments)


def test_all_at_once():
    """A whole command for nanoGPT is answered in one line, and none of our own keys in it is a mistake."""
    line = told("--batch_size=4", "--block_size=32", "--n_embd", "64", "--learning_rate", "6e-4", "--data", "text")
    assert line.count("there is no key") == 4
    assert f"{TOKENS}=128, which is 4 sequences x model.context_length=32" in line
    assert "model.d_model=64" in line
    assert "optim.lr=0.0006 with optim=adamw" in line


def test_in_a_file(tmp_path):
    """A model file in another's words is advised on with its numbers."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/wide.yaml").write_text("n_embd: 96\nn_head: 6\n")
    line = told("--config-dir", str(tmp_path), "model=wide")
    assert "no key 'model.n_embd' (nanoGPT): model.d_model=96; there is no key 'model.n_head'" in line


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"max_steps": -1}, "horizon=Nsteps"),
        ({"max_iters": None}, "horizon=Nsteps"),
        ({"max_steps": 5e3}, "there is no key 'max_steps' (Hugging Face): horizon=5000steps"),
        ({"trainer": {"max_epochs": 3}}, "there is no key 'trainer.max_epochs' (Lightning): horizon=3epochs"),
        (
            {"trainer": {"precision": "16-mixed"}},
            "trainer.precision=16-mixed is not known here: trainer.precision=fp16",
        ),
        ({"max_epochs": 0.5}, "horizon=0.5epochs"),
        ({"val_check_interval": 0.25}, "trainer.validate_every=N"),
        ({"batch_size": "many"}, "all sequences of a step x model.context_length"),
        ({"accumulate_grad_batches": 4}, "all sequences of a step x model.context_length"),
        ({"batch_size": 3, "gradient_accumulation_steps": 5}, f"{TOKENS}=1920, which is 3 x 5 sequences x"),
        ({"precision": "bf16-mixed"}, "trainer.precision=bf16"),
        ({"precision": "32-true"}, "trainer.precision=fp32"),
        ({"dtype": "float16"}, "trainer.precision=fp16"),
        ({"accelerator": "gpu"}, "trainer.device=cuda"),
        ({"init_from": "scratch"}, "init_from=scratch is not known here: leave it out"),
        ({"ckpt_path": "a/b.ckpt"}, "resume=a/b.ckpt"),
        (
            {"args": {"training": {"logging_steps": 7}}},
            "'args.training.logging_steps' (Hugging Face): trainer.log_every=7",
        ),
    ],
)
def test_advice(values, line):
    """Numbers are converted where they can be; where not, the line says what is meant."""
    assert line in advised(**values)


def test_nothing_is_advised_twice():
    """Two names of one thing are one line."""
    assert advised(batch_size=3, gradient_accumulation_steps=5).count(TOKENS) == 1


def test_our_own_configuration_needs_no_advice():
    """Also where a key of ours has the same last word as one of theirs."""
    assert advice(to_plain(Config()), OURS) == ""
    assert {"weight_decay", "warmup_steps", "dropout", "precision"} <= habits._THEIRS.keys()


@pytest.mark.parametrize("name", habits._THEIRS)
def test_every_key_of_ours_in_the_table_exists(name):
    """What the table says to write is a key here, and a value that the key takes where it is given."""
    _, template = habits._THEIRS[name]
    named = re.findall(
        r"(?<![\w.])((?:trainer|model|optim|data)\.\w+|horizon|run_dir|resume|init_from|logger)", template
    )
    assert named or template == "{tokens}" or template.startswith(("optim=", "leave it out"))
    assert [key for key in named if key not in OURS] == []


def test_advice_can_be_followed():
    """The numbers in it make a valid configuration."""
    (tokens,) = re.findall(rf"{TOKENS}=(\d+)", advised(batch_size=12))
    (horizon,) = re.findall(r"horizon=(\w+)", advised(max_iters=5000.0))
    config = validate({"trainer": {"tokens_per_step": int(tokens)}, "horizon": horizon})
    assert config.trainer.tokens_per_step == 12 * config.model.context_length


def test_stored_configurations_are_advised_on_too():
    with pytest.raises(UserError, match=r"model\.num_layers=3"):
        validate({"model": {"n_layer": 3}})


@pytest.mark.parametrize(
    ("arguments", "unknown", "expected"),
    [
        ([], [], []),
        (["seed=3", "-m", "optim.lr=1,2"], ["optim.lr=1,2"], ["-m", "seed=3", "optim.lr=1,2"]),
        (["seed=3", "--config-dir", "mine", "model=own"], [], ["--config-dir", "mine", "seed=3", "model=own"]),
        (["--seed", "3", "--data=text"], ["--seed", "--data=text"], ["seed=3", "data=text"]),
        (["--bf16", "--resume", "auto"], ["--bf16", "--resume"], ["++bf16=true", "resume=auto"]),
        (["--max_steps", "-1", "seed=3"], ["--max_steps"], ["++max_steps=-1", "seed=3"]),
        (["--cfg", "job", "n_head=3"], [], ["--cfg", "job", "++n_head=3"]),
        (["optim.weight_decay=0.1", "weight_decay=0.1"], [], ["optim.weight_decay=0.1", "++weight_decay=0.1"]),
        (["data.path=~/a", "+data.cache=~"], [], ["data.path=/home/me/a", "+data.cache=/home/me"]),
        (["data.path=a~b", "~seed"], [], ["~seed", "data.path=a~b"]),
    ],
)
def test_rewritten(arguments, unknown, expected, monkeypatch):
    """What Hydra would refuse, as it takes it; all else stays as it is, in the order that Hydra expects."""
    monkeypatch.setenv("HOME", "/home/me")
    assert rewritten(arguments, unknown, OURS) == expected


@pytest.mark.parametrize(
    "value",
    ["a=b", "a,b", "a b, c", "it's", 'say "a"', "(a)", "[a", "{a}", "né", "a#b", "a;b", "a\\b", "~/a", "[a=b, c]"],
)
def test_quoting_gives_the_value_as_it_stands(value):
    """The word that is advised, read by a shell and then by Hydra, is the value; in a list, each of its values."""
    (word,) = shlex.split(quoted(f"data.path={value}"))
    read = OverridesParser.create().parse_override(word).value()
    listed = value.startswith("[") and value.endswith("]")
    assert read == [part.strip() for part in value[1:-1].split(",")] if listed else str(read) == value


@pytest.mark.parametrize("value", ["a,b", "it's"])
def test_the_advised_quoting_is_told(value):
    """And the line that refuses the value without quotes ends with it."""
    assert told("data=text", f"data.path={value}").endswith(f"quotes inside quotes: {quoted(f'data.path={value}')}\n")


def test_several_values_without_a_sweep():
    """A comma may have been meant for a sweep or a list."""
    assert "'seed=1,2' has several values: add -m to train with each, or brackets for a list" in told("seed=1,2")


@pytest.mark.parametrize("key", ["run_dir", "resume", "init_from"])
def test_home(key, monkeypatch):
    """`~` is the home directory, however it comes."""
    monkeypatch.setenv("HOME", "/home/me")
    assert leaves(to_plain(validate({key: "~/runs/a"})))[key] == "/home/me/runs/a"
    assert validate({"data": {"cache": "~/c"}}).data.cache == "/home/me/c"


def test_spaces_in_paths(tmp_path):
    """They need no more than the shell's quotes."""
    line = told(
        "data=text", f"data.path={tmp_path}/a b.txt", f"run_dir={tmp_path}/a run", f"data.cache={tmp_path}/a cache"
    )
    assert f"data.path='{tmp_path}/a b.txt' is not a file" in line
