"""The configuration: every file in configs/ is valid, and every mistake is one line that names its key."""

import dataclasses
import functools
import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from gpt.data.corpus import DataConfig
from gpt.data.tokenizer import TokenizerConfig
from gpt.errors import UserError
from gpt.files import flatten, read_yaml
from gpt.model.transformer import GPTConfig, ModelConfig
from gpt.training.cli import describe_hydra_error, to_plain_values
from gpt.training.config import (
    REPLACED_KEYS,
    Config,
    Horizon,
    TrainerConfig,
    config_to_yaml,
    describe_unknown_key,
    load_config,
    parse_config,
    parse_horizon,
)
from gpt.training.optim import OptimConfig
from harness import differences, refusal, tiny_arguments, train

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SHIPPED = sorted(f"{file.parent.name}={file.stem}" for file in CONFIGS.glob("*/*.yaml"))
NEEDS_PATH = {"data=text", "data=tokens"}  # they are for what the user names

EXAMPLES = settings(max_examples=100, deadline=None, derandomize=True, database=None)


@functools.cache
def compose_train(*overrides: str) -> DictConfig:
    """Return what `python train.py` composes from these arguments."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONFIGS)):
        return compose("train", overrides=list(overrides))


def parsed(*overrides: str) -> Config:
    """Return the configuration of `python train.py` with these arguments."""
    return parse_composed(compose_train(*overrides))


def parse_composed(composition: DictConfig) -> Config:
    values = to_plain_values(composition)
    return parse_config({key: value for key, value in values.items() if key not in ("callbacks", "plan")})


def with_path(choice: str) -> list[str]:
    return [choice, "data.path=some.txt"] if choice in NEEDS_PATH else [choice]


def write_and_read(config: Config, file: Path) -> Config:
    """Write a configuration to a YAML file, as a run does, and read it."""
    file.write_text(config_to_yaml(config), encoding="utf-8")
    return load_config(file)


# --- what is shipped ---


@pytest.mark.parametrize("choice", SHIPPED)
def test_shipped_file_is_valid(choice, tmp_path):
    """Its values reach the configuration, and come back from what a run stores."""
    valid = parsed(*with_path(choice))
    config = flatten(dataclasses.asdict(valid))
    group, name = choice.split("=")
    content = OmegaConf.to_container(OmegaConf.load(CONFIGS / group / f"{name}.yaml"))
    content.pop("defaults", None)
    expected = flatten(content if group == "experiment" else {group: content})
    expected = {key: value for key, value in expected.items() if value is not None}  # null: decided by the dataclass
    assert expected
    assert {key: config[key] for key in expected} == expected
    assert parse_config(dataclasses.asdict(valid)) == write_and_read(valid, tmp_path / "config.yaml") == valid


def test_help_names_keys_groups_and_defaults():
    """No line is wider than a page."""
    done = train("--help")
    assert done.stderr == ""
    keys = flatten(dataclasses.asdict(Config())) | dict.fromkeys(("data", "model", "optim", "tokenizer", "plan"))
    named = set(re.findall(r"([a-z_.]+)=", done.stdout)) - {"key"}
    assert len(named) > 15 and named <= keys.keys()
    defaults = re.findall(r"^  ([a-z_.]+)=.*\(default: ([\w]+)\)", done.stdout, re.M)
    assert [(key, value) for key, value in defaults if key != "run_dir"] == [
        (key, str(keys[key])) for key in ("tokenizer.vocab_size", "seed", "trainer.tokens_per_step", "trainer.device")
    ]
    assert "\noptim: adamw, muon\n" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120


def test_every_key_can_be_set_without_a_plus():
    """Hydra composes the keys of the dataclasses, and two more."""
    plain = OmegaConf.to_container(compose_train())
    assert flatten(plain).keys() == Config().settings().keys() | {"callbacks", "plan"}


@pytest.mark.parametrize(
    ("file", "config_class"),
    [("model/mini", ModelConfig), ("trainer/default", TrainerConfig), ("optim/muon", OptimConfig)],
)
def test_file_shows_every_default(file, config_class):
    shown = read_yaml(CONFIGS / f"{file}.yaml")
    assert shown == dataclasses.asdict(config_class())


def test_experiment_chooses_groups():
    """The command line overrides its choices."""
    config = parsed("experiment=gpt2_small")
    assert (config.model, config.tokenizer.name) == (ModelConfig(1024, 768, 12, 12), "gpt2")
    config = parsed("experiment=gpt2_small", "model=mini", "tokenizer=byte", "optim.lr=0.5")
    assert (config.model.d_model, config.tokenizer.name, config.optim.lr) == (128, "byte", 0.5)
    assert parsed("experiment=finetune").optim.name == "adamw"


@pytest.mark.parametrize(
    ("name", "vocab_size", "expected"),
    [
        ("mini", 1536, (1536 + 256) * 128 + 4 * (12 * 128**2 + 13 * 128) + 2 * 128),  # embeddings, blocks, last norm
        ("gpt2_small", 50257, 124_439_808),
        ("gpt2_medium", 50257, 354_823_168),
        ("gpt2_large", 50257, 774_030_080),
        ("gpt2_xl", 50257, 1_557_611_200),
    ],
)
def test_parameter_counts(name, vocab_size, expected):
    """GPT-2's sizes are the published ones. Each file names the size of its model."""
    shape = parsed(f"model={name}", "trainer.tokens_per_step=1024").model
    assert GPTConfig(vocab_size=vocab_size, **dataclasses.asdict(shape)).num_parameters == expected
    stated = f"{expected / 1e6:.1f} million" if name == "mini" else f"{expected:,}"
    assert stated in (CONFIGS / "model" / f"{name}.yaml").read_text(encoding="utf-8")


# --- mistakes ---


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"optim": {"lrr": 3}}, "there is no key 'optim.lrr'; did you mean 'optim.lr'?"),
        ({"horzon": "3steps"}, "there is no key 'horzon'; did you mean 'horizon'?"),
        ({"modle": {"d_model": 64}}, "there is no key 'modle'; see docs/configuration.md for the keys there are"),
        ({"model": {"vocab_size": 5}}, "there is no key 'model.vocab_size'; did you mean 'tokenizer.vocab_size'?"),
        ({"model": None}, "model=None is not a group of keys such as model.context_length"),
        ({"model": {"d_model": None}}, "model.d_model=None is not of type int"),
        ({"model": {"d_model": True}}, "model.d_model=True is not of type int"),
        ({"model": {"dropout": "high"}}, "model.dropout='high' is not of type float"),
        ({"model": {"qkv_bias": "maybe"}}, "model.qkv_bias='maybe' is not of type bool"),
        ({"data": {"text_field": ["a"]}}, "data.text_field=['a'] is not of type str"),
        ({"optim": {"betas": None}}, "optim.betas=None is not of type list"),
        ({"optim": {"betas": [0.9, "x"]}}, "optim.betas[1]='x' is not of type float"),
        ({"optim": {"lr": True}}, "optim.lr=True is not of type float"),
        ({"seed": 1.5}, "seed=1.5 is not of type int"),
    ],
)
def test_wrong_key_or_type_is_refused(values, line):
    assert refusal(parse_config, values) == line


def test_mistake_in_an_experiment_file_is_refused(tmp_path):
    """The file may lack the line with its package."""
    (tmp_path / "experiment").mkdir()

    def compose_experiment(name: str, content: str) -> DictConfig:
        (tmp_path / f"experiment/{name}.yaml").write_text(content)
        return compose_train(f"hydra.searchpath=[file://{tmp_path}]", f"experiment={name}")

    composed = compose_experiment("misspelt", "# @package _global_\nmodel:\n  d_modle: 64\n")
    assert "did you mean 'model.d_model'?" in refusal(parse_composed, composed)
    line = "an experiment file must begin with the line: # @package _global_"
    assert refusal(parse_composed, compose_experiment("unmarked", "horizon: 5steps\n")) == line
    with pytest.raises(HydraException) as caught:
        compose_experiment("grouped", "defaults:\n  - override /data: text\n")
    assert describe_hydra_error(caught.value) == line


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"trainer": {"device": "tpu"}}, r"trainer\.device='tpu' .*choose from auto, cpu, cuda, mps"),
        ({"trainer": {"precision": "fp8"}}, r"trainer\.precision='fp8' .*choose from auto, fp32, bf16, fp16"),
        ({"trainer": {"compile": "maybe"}}, r"trainer\.compile='maybe' .*choose from auto, true, false"),
        ({"trainer": {"strategy": "fsdp"}}, r"trainer\.strategy='fsdp' .*choose from auto, ddp"),
        ({"trainer": {"devices": 0}}, r"trainer\.devices=0 .*at least 1"),
        ({"trainer": {"checkpoint_minutes": 0}}, r"trainer\.checkpoint_minutes=0\.0 .*above 0"),
        ({"trainer": {"micro_batch_size": 0}}, r"trainer\.micro_batch_size=0 .*auto or at least 1"),
        ({"trainer": {"micro_batch_size": "many"}}, r"trainer\.micro_batch_size=many .*auto or at least 1"),
        ({"optim": {"name": "sgd"}}, r"optim\.name='sgd' .*choose from muon, adamw"),
        ({"optim": {"schedule": "step"}}, r"optim\.schedule='step' .*choose from linear, cosine, constant"),
        ({"optim": {"lr": 0.0}}, r"optim\.lr=0\.0 .*above 0 and at most 10"),
        ({"optim": {"lr": float("nan")}}, r"optim\.lr=nan .*above 0 and at most 10"),
        ({"optim": {"matrix_lr": 11.0}}, r"optim\.matrix_lr=11\.0 .*above 0 and at most 10"),
        ({"optim": {"weight_decay": -0.1}}, r"optim\.weight_decay=-0\.1 .*at least 0"),
        ({"optim": {"warmup_steps": -1}}, r"optim\.warmup_steps=-1 .*at least 0"),
        ({"optim": {"momentum": 1.1}}, r"optim\.momentum=1\.1 .*at least 0 and below 1"),
        ({"optim": {"final_lr": -0.1}}, r"optim\.final_lr=-0\.1 .*at least 0 and at most 1"),
        ({"optim": {"betas": [0.9, 1.0]}}, r"optim\.betas=\[0\.9, 1\.0\] .*at least 0 and below 1"),
        ({"optim": {"betas": [0.9]}}, r"optim\.betas=\[0\.9\] .*two numbers"),
        ({"seed": -1}, r"seed=-1 .*at least 0 and below 2\^63"),
        ({"seed": 2**63}, r"seed=9223372036854775808 .*below 2\^63"),
        ({"logger": ["csv", "comet"]}, r"logger='comet' .*choose from tensorboard, csv, wandb, mlflow"),
    ],
)
def test_value_out_of_range_is_refused(values, message):
    """The line has the key, the value and the limit."""
    with pytest.raises(UserError, match=message):
        parse_config(values)


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"tokens_per_step": 1000}, r"tokens_per_step=1000 .*context_length=64 times 1 devices: try 960"),
        ({"tokens_per_step": 63}, r"tokens_per_step=63 .*try 64"),
        ({"tokens_per_step": 960, "devices": 2}, r"tokens_per_step=960 .* times 2 devices: try 896"),
        ({"tokens_per_step": 960, "micro_batch_size": 4}, r"micro_batch_size=4 does not divide the 15 sequences"),
        ({"tokens_per_step": 896, "devices": 2, "micro_batch_size": 14}, r"micro_batch_size=14 .* the 7 sequences"),
    ],
)
def test_step_of_a_fraction_of_a_sequence_is_refused(trainer, message):
    """A step has whole sequences on every device, and whole micro-batches. The suggested value is valid."""
    with pytest.raises(UserError, match=message) as caught:
        parse_config({"model": {"context_length": 64}, "trainer": trainer})
    if "try" in str(caught.value):
        trainer = trainer | {"tokens_per_step": int(str(caught.value).split("try ")[1])}
        parse_config({"model": {"context_length": 64}, "trainer": trainer})


def test_interpolation_of_an_unknown_key_is_refused():
    """The line has the key with the interpolation."""
    composition = OmegaConf.create({"data": {"prompts": ["${nowhere}"]}})
    assert refusal(to_plain_values, composition).startswith("data.prompts[0]: ")


@pytest.mark.promise("security.md#Configurations in checkpoints")
@pytest.mark.parametrize(
    "text", ["${oc.env:HOME}", "\\${oc.env:HOME}", "a ${nowhere} b", "\\\\${x}", "${", "$", "\\", "???"]
)
def test_stored_configurations_are_literal(text, tmp_path):
    """Nothing in a checkpoint or a config.yaml is interpolated, so it cannot read the environment."""
    config = parse_config({"data": {"prompts": [text]}})
    assert config.data.prompts == [text]
    (tmp_path / "config.yaml").write_text(config_to_yaml(config))
    assert load_config(tmp_path / "config.yaml").data.prompts == [text]


@pytest.mark.parametrize(
    ("content", "words"),
    [("model: {", "cannot be read"), ("[model]", "holds no configuration of a run")],
)
def test_file_without_a_configuration_is_refused(tmp_path, content, words):
    (tmp_path / "config.yaml").write_text(content)
    assert words in refusal(load_config, tmp_path / "config.yaml")


# --- numbers as people write them ---


def test_values_are_converted_to_the_types_of_their_keys():
    """To YAML, `compile: true` is a bool, and 1e3 is a float."""
    config = parsed("trainer.log_every=1e1", "seed=1.2e3", "optim.lr=1e-3")
    values = (config.trainer.log_every, config.seed, config.optim.lr)
    assert [(value, type(value)) for value in values] == [(10, int), (1200, int), (0.001, float)]
    values = {"compile": True, "micro_batch_size": 4, "tokens_per_step": 8192}
    trainer = parse_config({"trainer": values}).trainer
    assert (trainer.compile, trainer.micro_batch_size) == ("true", 4)
    assert parsed("trainer.compile=False", "trainer.micro_batch_size=2").trainer.compile == "false"
    assert parsed("logger=csv").logger == ["csv"]
    assert parse_config({"seed": "7", "optim": {"lr": "1e-3"}, "model": {"qkv_bias": "False"}}) == Config(
        seed=7, optim=OptimConfig(lr=0.001), model=ModelConfig(qkv_bias=False)
    )


# --- the horizon ---


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("2000steps", 2000, "steps"),
        ("5ksteps", 5000, "steps"),
        ("100Mtokens", 100_000_000, "tokens"),
        ("1.5Btokens", 1_500_000_000, "tokens"),
        ("0.5epoch", 0.5, "epochs"),
        ("90s", 90, "seconds"),
        ("3min", 180, "seconds"),
        ("1.5h", 5400, "seconds"),
        (" 2 k steps ", 2000, "steps"),
    ],
)
def test_horizons(text, amount, unit):
    assert parse_horizon(text) == Horizon(amount, unit)


MALFORMED = """
    3 steps 0steps 0.0h -3steps +3steps 1e3steps 1_000steps 1,000steps .5h 5.h 3m 3sec 3hours 1day 100mtokens 3Ksteps
    3kepochs 3Ms 3Steps 3stepss nansteps infsteps
"""


@pytest.mark.parametrize("text", ["", *MALFORMED.split(), "3 steps each", "3st eps", "3steps 4steps"])
def test_malformed_horizon_is_refused(text):
    """The line has the value, and examples that are themselves horizons."""
    line = refusal(parse_horizon, text)
    assert line.startswith(f"horizon={text!r} is not a horizon: ")
    examples = line.split("such as ")[1].replace(" or ", ", ").split(", ")
    assert len(examples) == 6
    assert all(parse_horizon(example).amount > 0 for example in examples)


@EXAMPLES
@given(st.text(alphabet="0123456789.-+ekMBsteponhmidays ", max_size=12))
def test_any_text_is_a_positive_horizon_or_refused(text):
    try:
        horizon = parse_horizon(text)
    except ValueError as error:
        assert repr(text) in str(error)
    else:
        assert horizon.amount > 0
        assert horizon.unit in ("steps", "tokens", "epochs", "seconds")


# --- there and back ---


@settings(EXAMPLES, max_examples=30)
@given(
    seed=st.integers(0, 2**63 - 1),
    lr=st.floats(0, 10, exclude_min=True),
    betas=st.lists(st.floats(0, 1, exclude_max=True), min_size=2, max_size=2),
    final_lr=st.floats(0, 1),
    prompts=st.lists(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\x85"), max_size=12)),
    run_dir=st.sampled_from([None, "runs/a", "null", "true", "1e3", "0x10", "1:30", "2026-01-01", "~", "no", "#"]),
)
def test_any_values_survive_being_stored(tmp_path_factory, seed, lr, betas, final_lr, prompts, run_dir):
    """No digit is lost, and no string becomes a value of another type."""
    config = Config(
        data=DataConfig(prompts=prompts),
        optim=OptimConfig(lr=lr, betas=betas, final_lr=final_lr),
        seed=seed,
        run_dir=run_dir,
    )
    assert parse_config(dataclasses.asdict(config)) == config
    assert write_and_read(config, tmp_path_factory.getbasetemp() / "config.yaml") == config


def test_missing_keys_have_their_defaults():
    """Parsing does not change its argument. What is no dictionary is refused."""
    values = {"trainer": {"compile": "TRUE", "log_every": 1e1}, "seed": 3}
    expected = Config(trainer=TrainerConfig(compile="true", log_every=10), seed=3)
    assert parse_config(values) == expected
    assert values == {"trainer": {"compile": "TRUE", "log_every": 1e1}, "seed": 3}
    assert parse_config({}) == Config()
    assert "is not a group of keys such as model" in refusal(parse_config, [])
    sections = {"model": ModelConfig, "data": DataConfig, "tokenizer": TokenizerConfig, "optim": OptimConfig}
    assert all(getattr(Config(), name) == section() for name, section in sections.items())


# --- suggestions ---


@pytest.mark.parametrize(
    ("key", "suggested"),
    [
        ("optm.lr", "optim.lr"),
        ("model.dmodel", "model.d_model"),
        ("lr", "optim.lr"),
        ("context_length", "model.context_length"),
        ("model.warmup_steps", "optim.warmup_steps"),
    ],
)
def test_unknown_key_suggests_the_nearest(key, suggested):
    """The key may be misspelt, or in the wrong group."""
    assert describe_unknown_key(key) == f"there is no key {key!r}; did you mean {suggested!r}?"


def test_key_of_version_0_names_its_replacement():
    for key in ("rerun", "trainer.short_window"):
        group, _, name = key.rpartition(".")
        line = refusal(parse_config, {group: {name: 1}} if group else {name: 1})
        assert line == f"there is no key {key!r} since version 1.0: use {REPLACED_KEYS[key]}"


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"data": {"name": "text", "path": "caf\udce9.txt"}}, r"data.path='caf\udce9.txt'"),
        ({"data": {"name": "text", "path": ["a.txt", "caf\udce9.txt"]}}, r"data.path=['a.txt', 'caf\udce9.txt']"),
        ({"data": {"prompts": ["half a pair: \ud83d"]}}, r"data.prompts=['half a pair: \ud83d']"),
        ({"run_dir": "r\udce9"}, r"run_dir='r\udce9'"),
    ],
)
def test_bytes_that_are_not_utf8_are_refused(values, line):
    """config.yaml could not hold them."""
    assert refusal(parse_config, values) == f"{line} has bytes that are not UTF-8: give it another name"


@pytest.mark.slow
def test_saved_configuration_trains_the_same_run(corpus_folder, tmp_path, monkeypatch):
    """The output of --cfg job and the config.yaml of a run can be used like files in configs/."""
    monkeypatch.chdir(tmp_path)
    words = tiny_arguments(corpus_folder, "horizon=2steps")
    Path("saved.yaml").write_text(train(*words, "run_dir=first", "--cfg", "job").stdout)
    train("--config-dir", ".", "--config-name", "saved")
    train("--config-dir", "first", "--config-name", "config", "run_dir=second")
    assert differences(Path("first"), Path("second")) == []
