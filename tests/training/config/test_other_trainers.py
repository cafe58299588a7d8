"""Keys of nanoGPT, Hugging Face and Lightning get a line that says what to write; so do other habits of a shell."""

import re
from dataclasses import asdict

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from gpt.console import quote
from gpt.errors import UserError
from gpt.files import flatten, read_yaml
from gpt.training.config.loading import OTHER_TRAINERS, unknown_key, validate
from gpt.training.config.schema import Config
from gpt.training.config.words import as_typed, for_hydra
from harness import refusal, refused


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["max_iters=5000"], "there is no key 'max_iters': write horizon=Nsteps"),
        (["epochs=3"], "there is no key 'epochs': write horizon=Nepochs"),
        (["steps=3"], "there is no key 'steps': write horizon=Nsteps"),
        (["tokenizer=char"], "tokenizer=char is not known: choose from bpe, byte, gpt2; byte comes closest to"),
        (["data=book"], "; for a text of your own say data.path=FILE"),
        (["++data.batch_size=3"], "there is no key 'data.batch_size': write trainer.tokens_per_step, which counts"),
        (["seed=3", "-m", "n_layer=2,3"], "there is no key 'n_layer': write model.num_layers"),
        (["model.emb_dim=768"], "there is no key 'model.emb_dim': write model.d_model"),
        (["trainer.n_heads=12"], "there is no key 'trainer.n_heads': write model.num_heads"),
        (["++optim.depth=12"], "there is no key 'optim.depth': write model.num_layers"),
        (["--seed", "3"], "--seed: keys are written key=value"),
    ],
)
def test_command_line(arguments, line):
    """Bare, with a group and plus signs, in a sweep, and with dashes."""
    assert line in refused(*arguments)


def test_in_a_file():
    """All keys of another's model file are answered at once."""
    line = refusal(validate, {"model": {"n_embd": 96, "n_head": 6}})
    assert line == "; ".join(unknown_key(f"model.{key}") for key in ("n_embd", "n_head"))


@pytest.mark.parametrize(
    ("theirs", "ours"), [(key, ours) for ours, keys in read_yaml(OTHER_TRAINERS).items() for key in keys.split()]
)
def test_every_key_in_the_table_exists(theirs, ours):
    """What the table says to write is a key here, and what it replaces is none."""
    named = re.findall(r"(?<![\w.])((?:trainer|model|optim|data)\.\w+|horizon|run_dir|resume|init_from|logger)", ours)
    assert named or ours.startswith(("optim=", "nothing"))
    assert [key for key in named if key not in flatten(asdict(Config()))] == []
    with pytest.raises(UserError):
        validate({theirs: 1})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["seed=3", "-m", "optim.lr=1,2"], ["-m", "seed=3", "optim.lr=1,2"]),
        (["seed=3", "--config-dir", "mine", "model=own"], ["--config-dir", "mine", "seed=3", "model=own"]),
        (["seed=~"], ["seed=~"]),
    ],
)
def testfor_hydra(words, expected, monkeypatch):
    """What Hydra would refuse, as it takes it: options first; and `~` is the home directory, however it comes."""
    monkeypatch.setenv("HOME", "/me")
    assert for_hydra(words) == expected
    given = ["data.separator=<|a|>", "data.separator=[SEP]", "data.separator='---'", "data.separator=null"]
    quoted = ["data.separator='<|a|>'", "data.separator='[SEP]'", *given[2:]]
    assert for_hydra(given) == quoted
    config = validate({"run_dir": "~/a", "resume": "~/b", "data": {"cache": "~/c"}})
    assert (config.run_dir, config.resume, config.data.cache) == ("/me/a", "/me/b", "/me/c")


@pytest.mark.parametrize(
    ("typed", "path"),
    [
        ("größe.txt", "größe.txt"),
        ("新加卷2.txt", "新加卷2.txt"),
        ("2026_11_25", "2026_11_25"),
        ("007", "007"),
        ("true", "true"),
        ("it's (2) {x}.txt", "it's (2) {x}.txt"),
        ("a\\'b\\", "a\\'b\\"),
        ("runs/lr=0.01", "runs/lr=0.01"),
        ("~/a", "/me/a"),
        ("a~b", "a~b"),
        ("null", None),
        ("'in, quotes'", "in, quotes"),
        ("[größe.txt, b.txt]", ["größe.txt", "b.txt"]),
        ("['a,b.txt', c.txt]", ["a,b.txt", "c.txt"]),
    ],
)
@pytest.mark.parametrize("key", ["data.path", "+data.cache", "run_dir", "resume", "rerun", "init_from"])
def test_paths_are_taken_as_they_stand(typed, path, key, monkeypatch):
    """Whatever Hydra's grammar makes of such characters elsewhere, without a second pair of quotes."""
    monkeypatch.setenv("HOME", "/me")
    (word,) = for_hydra([f"{key}={typed}"])
    assert OverridesParser.create().parse_override(word).value() == path
    assert as_typed([word]) == quote(f"{key}={typed}")


def test_a_sweep_over_paths(monkeypatch, tmp_path):
    """With -m a comma parts paths, unless a file has it in its name; Hydra's functions stay."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py", "-m"])
    assert for_hydra(["data.path=größe.txt,b c.txt"]) == ["data.path='größe.txt','b c.txt'"]
    assert for_hydra(["data.path=glob(*)"]) == ["data.path=glob(*)"]
    (tmp_path / "a,b.txt").touch()
    assert for_hydra(["data.path=a,b.txt"]) == ["data.path='a,b.txt'"]


def test_quotes_inside_quotes(tmp_path):
    """The line that refuses a value without them says how they are written; spaces need no more than the shell's."""
    line = refused("data=text", "data.path=a,b")
    assert "'data.path=a,b' has several values" in line
    assert line.endswith("""use quotes inside quotes, as in 'data.path="a,b.txt"'""")
    assert "'seed=1,2' has several values: add -m to train with each, or brackets for a list" in refused("seed=1,2")
    line = refused("data=text", f"data.path={tmp_path}/a b.txt", f"data.cache={tmp_path}/a cache")
    assert f"data.path='{tmp_path}/a b.txt' names no text file" in line
