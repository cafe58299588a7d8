"""Overrides: mistakes are one line, paths need no second quotes, and a command can be repeated."""

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from gpt.console import shell_quote
from gpt.training.config import parse_config
from gpt.training.overrides import original_spelling, quote_for_hydra, to_shell_words
from harness import train_refusal


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["max_iters=5000"], "there is no key 'max_iters'; see docs/configuration.md for the keys there are"),
        (["seed=3", "-m", "model.n_layers=2,3"], "there is no key 'model.n_layers'; did you mean 'model.num_layers'?"),
        (["rerun=runs/NAME"], "there is no key 'rerun' since version 1.0: use the first line of the run's command.txt"),
        (["++trainer.short_window=8"], "'trainer.short_window' since version 1.0: use trainer.short_sequences"),
        (["data=prepared"], "there is no data=prepared since version 1.0: use data=tokens data.path=DIR"),
        (["tokenizer=char"], "tokenizer=char is not known: choose from bpe, byte, gpt2; byte comes closest to"),
        (["data=book"], "; for a text of your own say data.path=FILE"),
        (["--seed", "3"], "--seed: keys are written key=value"),
    ],
)
def test_command_line(arguments, line):
    """A key that is unknown, misspelt or gone, a wrong choice, and an option in place of a key."""
    assert line in train_refusal(*arguments)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["seed=3", "-m", "optim.lr=1,2"], ["-m", "seed=3", "optim.lr=1,2"]),
        (["seed=3", "--config-dir", "mine", "model=own"], ["--config-dir", "mine", "seed=3", "model=own"]),
        (["seed=~"], ["seed=~"]),
        (["seed=3", "optim.lr=1", "seed=4"], ["seed=4", "optim.lr=1"]),
    ],
)
def test_order_of_words(words, expected, monkeypatch):
    """Options come first, and of several values the last counts. `~` is the home directory, however it comes."""
    monkeypatch.setenv("HOME", "/me")
    assert quote_for_hydra(words) == expected
    given = ["data.separator=<|a|>", "data.separator=[SEP]", "data.separator='---'", "data.separator=null"]
    quoted = ["data.separator='<|a|>'", "data.separator='[SEP]'", *given[2:]]
    assert [quote_for_hydra([word])[0] for word in given] == quoted
    config = parse_config({"run_dir": "~/a", "resume": "~/b", "data": {"cache": "~/c"}})
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
@pytest.mark.parametrize("key", ["data.path", "+data.cache", "run_dir", "resume", "init_from"])
def test_paths_are_taken_as_they_stand(typed, path, key, monkeypatch):
    """Whatever Hydra's grammar makes of such characters elsewhere, without a second pair of quotes."""
    monkeypatch.setenv("HOME", "/me")
    (word,) = quote_for_hydra([f"{key}={typed}"])
    assert OverridesParser.create().parse_override(word).value() == path
    assert original_spelling([word]) == shell_quote(f"{key}={typed}")


def test_a_sweep_over_paths(monkeypatch, tmp_path):
    """With -m a comma parts paths, unless a file has it in its name; Hydra's functions stay."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py", "-m"])
    assert quote_for_hydra(["data.path=größe.txt,b c.txt"]) == ["data.path='größe.txt','b c.txt'"]
    assert quote_for_hydra(["data.path=glob(*)"]) == ["data.path=glob(*)"]
    (tmp_path / "a,b.txt").touch()
    assert quote_for_hydra(["data.path=a,b.txt"]) == ["data.path='a,b.txt'"]


def test_quotes_inside_quotes(tmp_path):
    """The line that refuses a value without them says how they are written; spaces need no more than the shell's."""
    line = train_refusal("data=text", "data.path=a,b")
    assert "'data.path=a,b' has several values" in line
    assert line.endswith("""use quotes inside quotes, as in 'data.path="a,b.txt"'""")
    assert "'seed=1,2' has several values: add -m to train with each, or brackets for a list" in train_refusal(
        "seed=1,2"
    )
    line = train_refusal("data=text", f"data.path={tmp_path}/a b.txt", f"data.cache={tmp_path}/a cache")
    assert f"data.path='{tmp_path}/a b.txt' names no text file" in line


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, 1e-9, 0.001, [], ["", "a b, c=d"], [1, 2.5]),
        *("", "4000steps", "null", "1e3", "2026_11_25", "it's (2) {x}.txt", "a\\'b\\", "größe.txt", "lr=0.01,wd=0.1"),
    ],
)
def test_words_of_a_call_give_its_values(value):
    """Whatever the values, the shell and Hydra read from the words what was written."""
    (word,) = shlex.split(to_shell_words({"data.prompts": value}))
    (word,) = quote_for_hydra([word])
    assert OverridesParser.create().parse_override(word).value() == value


def test_command_is_one_line():
    """A separator may have line ends, which a shell of Unix reads back."""
    assert to_shell_words({"data.separator": "\n'\n"}).count("\n") == 0
