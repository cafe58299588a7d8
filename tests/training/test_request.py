"""Requests: which text a path means, and which values contradict each other."""

import functools

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from gpt.files import CONFIGS
from gpt.training.cli import parse_overrides, to_plain_values
from gpt.training.request import Request, parse_request
from harness import refusal


@functools.cache
def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONFIGS)):
        return compose("train", overrides=list(overrides))


def parse_words(*overrides: str) -> Request:
    """Return the request of `python train.py` with these arguments."""
    model = dict(word.split("=", 1) for word in overrides).get("model", "")
    return parse_request(to_plain_values(composed(*overrides)), parse_overrides(list(overrides)), model=model)


@pytest.mark.parametrize(
    ("overrides", "name", "prompts"),
    [
        (["data.path=a.txt"], "text", None),
        (["+data.path=a.txt", "data.prompts=[b]"], "text", ["b"]),
        (["data.path=a.txt", "experiment=gpt2_small"], "text", None),
        (["data.path=s3://texts/made", "data=tokens"], "tokens", None),
        (["data.path=[a,python_docs]", "data=mix", "data.weights=[1,2]"], "mix", None),
        (["data.cache=a"], "python_docs", None),
        (["data.path=python_stdlib"], "python_stdlib", None),
    ],
)
def test_path_without_data_means_text_or_a_builtin_corpus(overrides, name, prompts):
    config = parse_words(*overrides).config
    assert (config.data.name, config.data.prompts) == (name, prompts)


INIT = ["init_from=runs/x"]


@pytest.mark.parametrize(
    ("overrides", "value", "hint"),
    [
        (["data=python_docs", "data.path=a.txt"], "data.path='a.txt'", "add one of these, or leave the path out"),
        (["experiment=shakespeare", "data.path=a.txt"], "data.path='a.txt'", "leave the path out"),
        (["plan=maybe"], "plan=maybe", "choose from true, json, false"),
        (["plan=true", "resume=runs/x"], "plan=true", "leave out resume"),
        (["resume=auto"], "resume=auto", "add run_dir=DIR"),
        (["resume=runs/x", "seed=3"], "seed=3 would change it", "init_from=runs/x"),
        (["resume=runs/x", "horizon=auto"], "horizon=auto", "such as horizon=8000steps"),
        (["model=auto", "horizon=400steps"], "not horizon=400steps", "set horizon=10min"),
        (["model=auto", "horizon=1Mtokens"], "not horizon=1Mtokens", "set horizon=10min"),
        (["model=auto", "horizon=auto"], "not horizon=auto", "set horizon=10min"),
        (["model=auto", "horizon=1min", *INIT], "model=auto does not go with init_from", "leave one of them out"),
        (["model=auto", "horizon=1min", "model.num_layers=3"], "model.num_layers=3", "leave one of them out"),
        ([*INIT, "model=gpt2_small"], "model=gpt2_small does not go with init_from", "leave it out"),
        ([*INIT, "tokenizer=byte"], "tokenizer=byte does not go with init_from", "leave it out"),
        (["experiment=finetune"], "experiment=finetune", "init_from=PATH"),
        (["optim.name=adamw"], "optim.name=adamw", "write optim=adamw"),
        (
            ["optim=adamw", "optim.matrix_lr=0.01"],
            "optim.matrix_lr=0.01 has no effect with optim=adamw",
            "configs/optim",
        ),
        (["optim=adamw", "optim.momentum=0.9"], "optim.momentum=0.9 has no effect with optim=adamw", "configs/optim"),
    ],
)
def test_contradiction_is_refused(overrides, value, hint):
    """The line has the value and the remedy."""
    line = refusal(parse_words, *overrides)
    assert value in line and hint in line
