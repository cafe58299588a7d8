"""Overrides: mistakes are one line, paths need no second quotes, and a command can be repeated."""

import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from gpt.console import shell_quote
from gpt.training.config import parse_config
from gpt.training.overrides import original_spelling, quote_for_hydra, to_shell_words
from harness import ROOT, train_refusal

README = ROOT / "README.md"
MODELS = "auto, gpt2_large, gpt2_medium, gpt2_small, gpt2_xl, mini, mini_128"


@pytest.mark.parametrize(
    ("arguments", "problem", "hint"),
    [
        (["+foo=1"], "there is no key 'foo'", "see docs/configuration.md"),
        (
            ["seed=3", "-m", "model.n_layers=2,3"],
            "there is no key 'model.n_layers'",
            "did you mean 'model.num_layers'?",
        ),
        (["data=prepared"], "there is no data=prepared", "use data=tokens data.path=DIR"),
        (["model=gpt3"], "model=gpt3 is not known", f"choose from {MODELS}"),
        (["model=3"], "a group takes the name of one of its files", "such as model=mini"),
        (["experiment=mine"], "experiment=mine is not known", "choose from finetune, gpt2_small, shakespeare"),
        (["tokenizer=char"], "tokenizer=char is not known: choose from bpe, byte, gpt2", "byte is the closest"),
        (["data=book"], "data=book is not known", "for your own text use data.path=FILE"),
        ([f"data={README}"], f"data={README} is not known", f"for your own text use data.path={README}"),
        (["README.md"], "'README.md' is not key=value", "to train on it, write data.path=README.md"),
        (["--seed", "3"], "--seed", "keys are written key=value, such as seed=3"),
        (["data=text", "data.path=a,b"], "'data.path=a,b' has several values", "'data.path=\"a,b.txt\"'"),
        (["seed=1,2"], "'seed=1,2' has several values", "add -m to train with each, or brackets for a list"),
        (["run_dir="], "run_dir= is empty", "give a path, or leave it out"),
    ],
)
def test_mistake_on_the_command_line_is_refused(arguments, problem, hint):
    """The line has what is wrong and the remedy."""
    line = train_refusal(*arguments)
    assert problem in line and hint in line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["seed=3", "-m", "optim.lr=1,2"], ["-m", "seed=3", "optim.lr=1,2"]),
        (["seed=3", "--config-dir", "mine", "model=own"], ["--config-dir", "mine", "seed=3", "model=own"]),
        (["seed=~"], ["seed=~"]),
        (["seed=3", "optim.lr=1", "seed=4"], ["seed=4", "optim.lr=1"]),
    ],
)
def test_options_come_first_and_the_last_value_counts(words, expected):
    assert quote_for_hydra(words) == expected


@pytest.mark.parametrize(
    ("key", "typed", "value"),
    [
        ("data.path", "größe.txt", "größe.txt"),
        ("data.path", "2026_11_25", "2026_11_25"),
        ("data.path", "007", "007"),
        ("data.path", "true", "true"),
        ("data.path", "it's (2) {x}.txt", "it's (2) {x}.txt"),
        ("data.path", "a\\'b\\", "a\\'b\\"),
        ("data.path", "null", None),
        ("data.path", "'in, quotes'", "in, quotes"),
        ("data.path", "[größe.txt, b.txt]", ["größe.txt", "b.txt"]),
        ("data.path", "['a,b.txt', c.txt]", ["a,b.txt", "c.txt"]),
        ("+data.cache", "a~b", "a~b"),
        ("run_dir", "runs/lr=0.01", "runs/lr=0.01"),
        ("resume", "新加卷2.txt", "新加卷2.txt"),
        ("init_from", "~/a", "/me/a"),
        ("data.separator", "<|a|>", "<|a|>"),
        ("data.separator", "[SEP]", "[SEP]"),
        ("data.separator", "'---'", "---"),
        ("data.separator", "null", None),
    ],
)
def test_paths_and_separators_need_no_second_quotes(key, typed, value, monkeypatch):
    """Hydra's grammar would read such characters otherwise."""
    monkeypatch.setenv("HOME", "/me")
    (word,) = quote_for_hydra([f"{key}={typed}"])
    assert OverridesParser.create().parse_override(word).value() == value
    assert original_spelling([word]) == shell_quote(f"{key}={typed}")


def test_tilde_is_the_home_directory_in_any_source(monkeypatch):
    """A file or a call may contain it too."""
    monkeypatch.setenv("HOME", "/me")
    config = parse_config({"run_dir": "~/a", "resume": "~/b", "data": {"cache": "~/c"}})
    assert (config.run_dir, config.resume, config.data.cache) == ("/me/a", "/me/b", "/me/c")


def test_comma_separates_paths_in_a_sweep(monkeypatch, tmp_path):
    """A file may have a comma in its name, and Hydra's functions stay."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py", "-m"])
    assert quote_for_hydra(["data.path=größe.txt,b c.txt"]) == ["data.path='größe.txt','b c.txt'"]
    assert quote_for_hydra(["data.path=glob(*)"]) == ["data.path=glob(*)"]
    Path("a,b.txt").touch()
    assert quote_for_hydra(["data.path=a,b.txt"]) == ["data.path='a,b.txt'"]


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, 1e-9, 0.001, [], ["", "a b, c=d"], [1, 2.5]),
        *("", "4000steps", "null", "1e3", "2026_11_25", "it's (2) {x}.txt", "a\\'b\\", "größe.txt", "lr=0.01,wd=0.1"),
    ],
)
def test_shell_words_keep_the_value(value):
    """The shell and Hydra read the value that was written."""
    (word,) = shlex.split(to_shell_words({"data.prompts": value}))
    (word,) = quote_for_hydra([word])
    assert OverridesParser.create().parse_override(word).value() == value


def test_command_is_one_line():
    """A separator may have line ends, which a shell of Unix reads back."""
    assert to_shell_words({"data.separator": "\n'\n"}).count("\n") == 0
