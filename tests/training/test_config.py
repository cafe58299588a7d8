"""The configuration: everything shipped composes and holds, and every mistake becomes a line that names its key."""

import dataclasses
import functools
import re
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

import train  # registers the defaults under which configs/train.yaml composes
from gpt.errors import UserError
from gpt.model.transformer import GPT, GPTConfig, ModelConfig
from gpt.text.corpus import DataConfig
from gpt.text.tokenizer import TokenizerConfig
from gpt.training.config import (
    Config,
    Horizon,
    TrainerConfig,
    parse_horizon,
    read,
    refuse_large_yaml,
    to_plain,
    to_yaml,
    unknown_key,
    validate,
)
from gpt.training.optim import OptimConfig

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SHIPPED = sorted(f"{file.parent.name}={file.stem}" for file in CONFIGS.glob("*/*.yaml"))
NEEDS_PATH = {"data=text", "data=huggingface"}  # they are for what the user names

EXAMPLES = settings(max_examples=100, deadline=None, derandomize=True, database=None)


@functools.cache
def composed(*overrides: str) -> DictConfig:
    """What `python train.py` composes from these arguments."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONFIGS)):
        return compose("train", overrides=list(overrides))


def composed_with_experiment(folder: Path, content: str) -> DictConfig:
    """What an experiment file of this content composes to."""
    (folder / "experiment").mkdir()
    (folder / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{content}\n", encoding="utf-8")
    return composed(f"hydra.searchpath=[file://{folder}]", "experiment=mine")


def with_path(choice: str) -> list[str]:
    return [choice, "data.path=some.txt"] if choice in NEEDS_PATH else [choice]


def leaves(tree: dict, prefix: str = "") -> dict[str, object]:
    """All values of nested dictionaries, under keys joined with dots."""
    flat: dict[str, object] = {}
    for key, value in tree.items():
        flat |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


# --- what is shipped ---


def test_shipped_files_are_found():
    """The tests below see every group."""
    assert {choice.split("=")[0] for choice in SHIPPED} == {
        "data",
        "experiment",
        "model",
        "optim",
        "tokenizer",
        "trainer",
    }


@pytest.mark.parametrize("choice", SHIPPED)
def test_shipped_config(choice):
    """Each shipped file composes, is valid, and means what it says: each of its values arrives at its key."""
    config = leaves(to_plain(validate(composed(*with_path(choice)))))
    group, name = choice.split("=")
    content = OmegaConf.to_container(OmegaConf.load(CONFIGS / group / f"{name}.yaml"))
    content.pop("defaults", None)
    expected = leaves(content if group == "experiment" else {group: content})
    expected = {key: value for key, value in expected.items() if value is not None}  # null: decided by the dataclass
    assert expected
    assert {key: config[key] for key in expected} == expected


def test_defaults_hold_every_key():
    """So that each key can be set without a plus, and none is there that the dataclasses lack, but for two."""
    plain = OmegaConf.to_container(composed())
    assert leaves(plain).keys() == leaves(to_plain(Config())).keys() | {"callbacks", "plan"}


def test_experiments_choose_their_groups():
    """What an experiment says of other groups holds, and the command line has the last word."""
    config = validate(composed("experiment=gpt2_small"))
    assert (config.model, config.tokenizer.name) == (ModelConfig(1024, 768, 12, 12), "gpt2")
    config = validate(composed("experiment=gpt2_small", "model=mini", "tokenizer=byte", "optim.lr=0.5"))
    assert (config.model.d_model, config.tokenizer.name, config.optim.lr) == (128, "byte", 0.5)
    assert validate(composed("experiment=finetune")).optim.name == "adamw"


@pytest.mark.parametrize(
    ("name", "vocab_size", "expected"),
    [
        ("mini", 1536, (1536 + 128) * 128 + 4 * (12 * 128**2 + 13 * 128) + 2 * 128),  # embeddings, blocks, last norm
        ("gpt2_small", 50257, 124_439_808),
        ("gpt2_medium", 50257, 354_823_168),
        ("gpt2_large", 50257, 774_030_080),
        ("gpt2_xl", 50257, 1_557_611_200),
    ],
)
def test_parameter_counts(name, vocab_size, expected):
    """Each model's size, counted without allocating it; GPT-2's are the published ones, which their files name."""
    shape = validate(composed(f"model={name}", "trainer.tokens_per_step=1024")).model
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=vocab_size, **dataclasses.asdict(shape)))
    assert model.num_parameters() == expected
    stated = f"{expected / 1e6:.1f} million" if name == "mini" else f"{expected:,}"
    assert stated in (CONFIGS / "model" / f"{name}.yaml").read_text(encoding="utf-8")


# --- mistakes ---


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("optim:\n  lrr: 3", r"'optim\.lrr'; did you mean 'optim\.lr'"),
        ("horzon: 3steps", r"'horzon'; did you mean 'horizon'"),
        ("d_model: 64", r"'d_model'; did you mean 'model\.d_model'"),
        ("modle:\n  d_model: 64", r"'modle'"),
        ("model:\n  d_model: wide", r"model\.d_model: .*'wide'"),
        ("model:\n  d_model: null", r"model\.d_model: .*'None'"),
        ("model: null", r"model=None stands where keys such as model\.context_length belong"),
        ("optim:\n  betas: [0.9, x]", r"optim\.betas\[1\]: .*'x'"),
        ("seed: 1.5", r"seed: .*'1\.5'"),
    ],
)
def test_mistakes_in_a_file(tmp_path, content, message):
    """A wrong name or type in a YAML file is one line that names the key."""
    with pytest.raises(UserError, match=message) as caught:
        validate(composed_with_experiment(tmp_path, content))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+optim.lrr=3", r"'optim\.lrr'; did you mean 'optim\.lr'"),
        ("++trainer.log_evry=3", r"'trainer\.log_evry'; did you mean 'trainer\.log_every'"),
        ("+d_model=64", r"'d_model'; did you mean 'model\.d_model'"),
        ("+model.vocab_size=5", r"'model\.vocab_size'; did you mean 'tokenizer\.vocab_size'"),
        ("model.d_model=wide", r"model\.d_model: .*'wide'"),
        ("model.d_model=64.5", r"model\.d_model: .*'64\.5'"),
        ("model.d_model=true", r"model\.d_model: .*'True'"),
        ("model.dropout=high", r"model\.dropout: .*'high'"),
        ("model.qkv_bias=maybe", r"model\.qkv_bias: .*'maybe'"),
        ("data.prompts=text", r"data\.prompts"),
        ("data.text_field=null", r"data\.text_field: .*'None'"),
        ("seed=null", r"seed: .*'None'"),
        ("optim.lr=true", r"optim\.lr: .*'True'"),
    ],
)
def test_mistakes_on_the_command_line(override, message):
    """So it is on the command line, with a plus too."""
    with pytest.raises(UserError, match=message) as caught:
        validate(composed(override))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lrr=3", r"'optim\.lrr'; did you mean 'optim\.lr'"),
        ("d_model=64", r"'d_model'; did you mean 'model\.d_model'"),
        ("modle=mini", r"'modle'"),
        ("model=gpt3", r"^model=gpt3 .*choose from gpt2_large, gpt2_medium, gpt2_small, gpt2_xl, mini$"),
        ("experiment=mine", r"^experiment=mine .*choose from finetune, gpt2_small, shakespeare$"),
        ("optim.lr", r"^'optim\.lr' is not key=value"),
        ("data.path=a=b", r"^'data\.path=a=b' is not key=value.*quotes"),
    ],
)
def test_mistakes_that_hydra_refuses(override, message):
    """What Hydra itself refuses, train.py says in a line that names the key too."""
    with pytest.raises(HydraException) as caught:
        composed(override)
    line = train.describe(caught.value)
    assert "\n" not in line
    assert re.search(message, line)


def test_experiment_without_its_first_line(tmp_path):
    """One that chooses groups fails in Hydra, which then names neither the file's fault nor the remedy."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text("# mine\n# @package _global_\ndefaults:\n  - override /data: text\n")
    with pytest.raises(HydraException) as caught:
        composed(f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine")
    assert train.describe(caught.value) == "an experiment file must begin with the line: # @package _global_"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": {"d_model": 130, "num_heads": 4}}, r"model\.d_model=130 .*model\.num_heads=4.*d_model=132"),
        ({"model": {"context_length": 0}}, r"model\.context_length=0 .*at least 1"),
        ({"model": {"dropout": 1.0}}, r"model\.dropout=1\.0 .*at least 0 and below 1"),
        ({"optim": {"lr": 0}}, r"optim\.lr=0\.0 .*above 0 and at most 10"),
        ({"optim": {"name": "sgd"}}, r"optim\.name='sgd' .*choose from muon, adamw"),
        ({"tokenizer": {"vocab_size": 256}}, r"tokenizer\.vocab_size=256 .*at least 257 .*at most 1000000"),
        ({"tokenizer": {"name": "char"}}, r"tokenizer\.name='char' .*choose from bpe, gpt2, byte"),
        ({"data": {"name": "web"}}, r"data\.name='web' .*choose from python_docs, python_stdlib, tinyshakespeare"),
        ({"data": {"name": "text"}}, r"data\.path=FILE"),
        ({"data": {"path": "a.txt"}}, r"data\.path='a\.txt' .*data=text"),
        ({"data": {"name": "text", "path": {"a": 1}}}, r"data\.path=\{'a': 1\} is not a path, nor a list of paths"),
        ({"data": {"name": "text", "path": [["a"]]}}, r"is not a path, nor a list of paths"),
        ({"data": {"name": "huggingface"}}, r"data=huggingface needs data\.path=NAME"),
        ({"data": {"name": "mix", "path": "a.txt", "weights": [1]}}, r"data=mix needs .* two different corpora"),
        ({"data": {"name": "mix", "path": ["a", "a"], "weights": [1, 2]}}, r"data=mix needs .* two different corpora"),
        ({"data": {"name": "mix", "path": ["a", "b"], "weights": [1]}}, r"data\.weights=\[1\.0\] does not fit"),
        ({"data": {"name": "text", "path": ["a", "b"], "weights": [1, 1]}}, r"data\.weights=.* does not fit"),
        ({"data": {"name": "mix", "path": ["a", "b"], "weights": [1, 0]}}, r"data\.weights=.* must be above 0"),
        (
            {"data": {"name": "text", "path": ["http://a/b", "https://c/d"]}},
            r"data\.path has several URLs, and .*download",
        ),
        ({"data": {"errors": "ignore"}}, r"data\.errors='ignore' .*choose from strict, replace"),
        ({"data": {"validation_bytes": 2 * 10**9}}, r"data\.validation_bytes=2000000000 .*at most 1000000000"),
        ({"data": {"max_bytes": 0}}, r"data\.max_bytes=0 .*at least 1"),
        ({"data": {"validation_bytes": 0}}, r"data\.validation_bytes=0 .*at least 1"),
        ({"trainer": {"device": "tpu"}}, r"trainer\.device='tpu' .*choose from auto, cpu, cuda, mps"),
        ({"trainer": {"precision": "fp8"}}, r"trainer\.precision='fp8' .*choose from auto, fp32, bf16, fp16"),
        ({"trainer": {"compile": "maybe"}}, r"trainer\.compile='maybe' .*choose from auto, true, false"),
        ({"trainer": {"devices": 0}}, r"trainer\.devices=0 .*at least 1"),
        ({"trainer": {"log_every": 0}}, r"trainer\.log_every=0 .*at least 1"),
        ({"trainer": {"validate_every": -1}}, r"trainer\.validate_every=-1 .*at least 1"),
        ({"trainer": {"checkpoint_every": 0}}, r"trainer\.checkpoint_every=0 .*at least 1"),
        ({"trainer": {"checkpoint_minutes": 0}}, r"trainer\.checkpoint_minutes=0\.0 .*above 0"),
        ({"trainer": {"micro_batch_size": 0}}, r"trainer\.micro_batch_size=0 .*auto or at least 1"),
        ({"trainer": {"micro_batch_size": "many"}}, r"trainer\.micro_batch_size=many .*auto or at least 1"),
        ({"seed": -1}, r"seed=-1 .*at least 0 and below 2\^63"),
        ({"seed": 2**63}, r"seed=9223372036854775808 .*below 2\^63"),
        ({"horizon": 1000}, r"horizon='1000' .*a unit"),
        ({"horizon": "0steps"}, r"horizon='0steps' .*above 0"),
        ({"resume": "a", "init_from": "b"}, r"resume and init_from exclude each other"),
    ],
)
def test_values_out_of_range(values, message):
    """A value out of its range is an error that names the key, the value and the limit."""
    with pytest.raises(UserError, match=message):
        validate(values)


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"tokens_per_step": 1000}, r"tokens_per_step=1000 .*context_length=64 times 1 devices: try 960"),
        ({"tokens_per_step": 63}, r"tokens_per_step=63 .*try 64"),
        ({"tokens_per_step": 960, "devices": 2}, r"tokens_per_step=960 .* times 2 devices: try 896"),
        ({"tokens_per_step": 960, "micro_batch_size": 4}, r"micro_batch_size=4 does not divide the 15 windows"),
        ({"tokens_per_step": 896, "devices": 2, "micro_batch_size": 14}, r"micro_batch_size=14 .* the 7 windows"),
    ],
)
def test_tokens_per_step_must_divide(trainer, message):
    """Steps are whole windows on every device, and whole micro-batches; the remedy named is valid."""
    with pytest.raises(UserError, match=message) as caught:
        validate({"model": {"context_length": 64}, "trainer": trainer})
    if "try" in str(caught.value):
        trainer = trainer | {"tokens_per_step": int(str(caught.value).split("try ")[1])}
        validate({"model": {"context_length": 64}, "trainer": trainer})


def test_either_start_is_accepted():
    """A run may be resumed, or begin from weights."""
    assert validate({"resume": "a"}).resume == "a"
    assert validate({"init_from": "b"}).init_from == "b"


def test_interpolation_is_a_mistake_of_the_user():
    """A reference to a key that does not exist is the user's error, and names where it stands."""
    with pytest.raises(UserError, match=r"data\.prompts\[0\]"):
        validate(OmegaConf.create({"data": {"prompts": ["${nowhere}"]}}))


@pytest.mark.parametrize(
    "text", ["${oc.env:HOME}", "\\${oc.env:HOME}", "a ${nowhere} b", "\\\\${x}", "${", "$", "\\", "???"]
)
def test_stored_configurations_are_literal(text, tmp_path):
    """What a checkpoint or a config.yaml says is never interpolated: it cannot read the environment, nor be missing."""
    config = validate({"data": {"prompts": [text]}})
    assert config.data.prompts == [text]
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert read(tmp_path / "config.yaml").data.prompts == [text]


def test_alias_bomb(tmp_path):
    """A file whose aliases would expand to billions of values is refused at once."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    bomb = tmp_path / "config.yaml"
    bomb.write_text("\n".join(["model: {}", *lines]))
    for refuse in (refuse_large_yaml, read):
        with pytest.raises(UserError, match="more than 100,000 values once its aliases are expanded"):
            refuse(bomb)
    bomb.write_text("a: &a [*a]\n")
    with pytest.raises(UserError, match="more than 100,000"):
        refuse_large_yaml(bomb)


@pytest.mark.parametrize("stored", [[], ["model"], 3, None, "text"])
def test_configuration_that_is_no_dictionary(stored):
    """A checkpoint's configuration of another type is one line."""
    with pytest.raises(UserError, match="not a dictionary"):
        validate(stored)


def test_value_in_place_of_a_section_names_the_section():
    """A plain value where keys belong names the section it stands for."""
    with pytest.raises(UserError, match=r"\bmodel\b"):
        validate({"model": 3})


# --- numbers as people write them ---


def test_exponents_are_integers_where_whole():
    """1e3 is a float to YAML, and an integer where one is wanted."""
    config = validate(composed("trainer.log_every=1e1", "seed=1.2e3", "model.context_length=6.4e1", "optim.lr=1e-3"))
    assert (config.trainer.log_every, config.seed, config.model.context_length) == (10, 1200, 64)
    assert {type(value) for value in (config.trainer.log_every, config.seed, config.model.context_length)} == {int}
    assert config.optim.lr == 0.001


def test_exponents_in_a_file(tmp_path):
    """So it is in a file."""
    config = validate(
        composed_with_experiment(tmp_path, "model:\n  context_length: 1e2\ntrainer:\n  tokens_per_step: 1e3")
    )
    assert (config.model.context_length, config.trainer.tokens_per_step) == (100, 1000)


def test_yaml_types_where_strings_are_wanted():
    """`compile: true` and `micro_batch_size: 4` are a bool and an int to YAML; both are meant and taken as words."""
    values = {"compile": True, "micro_batch_size": 4, "tokens_per_step": 8192}
    trainer = validate({"trainer": values}).trainer
    assert (trainer.compile, trainer.micro_batch_size) == ("true", "4")
    assert validate(composed("trainer.compile=False", "trainer.micro_batch_size=2")).trainer.compile == "false"


# --- the horizon ---


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("2000steps", 2000, "steps"),
        ("1step", 1, "steps"),
        ("5ksteps", 5000, "steps"),
        ("100Mtokens", 100_000_000, "tokens"),
        ("1.5Btokens", 1_500_000_000, "tokens"),
        ("1token", 1, "tokens"),
        ("3epochs", 3, "epochs"),
        ("0.5epoch", 0.5, "epochs"),
        ("90s", 90, "seconds"),
        ("3min", 180, "seconds"),
        ("2h", 7200, "seconds"),
        ("1.5h", 5400, "seconds"),
        (" 2 k steps ", 2000, "steps"),
    ],
)
def test_horizons(text, amount, unit):
    """Every unit, singular and plural, with its factor."""
    assert parse_horizon(text) == Horizon(amount, unit)


MALFORMED = """
    3 steps 0steps 0.0h -3steps +3steps 1e3steps 1_000steps 1,000steps .5h 5.h 3m 3sec 3hours 1day 100mtokens 3Ksteps
    3kepochs 3Ms 3Steps 3stepss nansteps infsteps
"""


@pytest.mark.parametrize("text", ["", *MALFORMED.split(), "3 steps each", "3st eps", "3steps 4steps"])
def test_malformed_horizons(text):
    """Anything else is refused by a line with the value and examples that are themselves horizons."""
    with pytest.raises(ValueError) as caught:
        parse_horizon(text)
    assert str(caught.value).startswith(f"horizon={text!r} is not a horizon: ")
    examples = str(caught.value).split("such as ")[1].replace(" or ", ", ").split(", ")
    assert len(examples) == 6
    assert all(parse_horizon(example).amount > 0 for example in examples)


@EXAMPLES
@given(
    st.decimals("0.001", 10**6, places=3),
    st.sampled_from([("", 1), ("k", 10**3), ("M", 10**6), ("B", 10**9)]),
    st.sampled_from(["step", "steps", "token", "tokens"]),
)
def test_any_amount(amount, thousands, unit):
    """Any decimal number is read as it is written."""
    letter, factor = thousands
    horizon = parse_horizon(f"{amount}{letter}{unit}")
    assert horizon.amount == pytest.approx(float(amount) * factor)
    assert horizon.unit == unit.rstrip("s") + "s"


@EXAMPLES
@given(st.text(alphabet="0123456789.-+ekMBsteponhmidays ", max_size=12))
def test_whatever_is_read_is_positive(text):
    """No text gives anything but an amount above 0 of a known unit, or a ValueError."""
    try:
        horizon = parse_horizon(text)
    except ValueError as error:
        assert repr(text) in str(error)
    else:
        assert horizon.amount > 0
        assert horizon.unit in ("steps", "tokens", "epochs", "seconds")


# --- there and back ---


def write_and_read(config: Config, file: Path) -> Config:
    """The configuration out of the YAML file that a run would keep of it."""
    OmegaConf.save(OmegaConf.create(to_plain(config)), file)
    return validate(OmegaConf.load(file))


@pytest.mark.parametrize("choice", SHIPPED)
def test_round_trip_of_shipped_configs(choice, tmp_path):
    """A valid configuration comes back the same from plain values and from its YAML file."""
    config = validate(composed(*with_path(choice)))
    assert validate(to_plain(config)) == config
    assert write_and_read(config, tmp_path / "config.yaml") == config


def test_plain_values_are_plain():
    """What goes into checkpoints and YAML files is of Python's own types throughout."""
    plain = to_plain(validate(composed()))
    assert type(plain["optim"]) is dict
    flat = [item for value in leaves(plain).values() for item in (value if isinstance(value, list) else [value])]
    assert {type(item) for item in flat} == {str, int, float, bool, type(None)}


@settings(EXAMPLES, max_examples=30)
@given(
    seed=st.integers(0, 2**63 - 1),
    lr=st.floats(0, 10, exclude_min=True),
    betas=st.lists(st.floats(0, 1, exclude_max=True), min_size=2, max_size=2),
    final_lr=st.floats(0, 1),
    # PyYAML cannot write U+0085; OmegaConf takes ${ for a reference and ??? for a missing value.
    prompts=st.lists(
        st.text(max_size=12).filter(lambda text: not {"\x85", "$"} & set(text) and text != "???"), max_size=3
    ),
    run_dir=st.sampled_from([None, "", "runs/a", "null", "true", "1e3", "0x10", "1:30", "2026-01-01", "~", "no", "#"]),
)
def test_round_trip_of_any_values(tmp_path_factory, seed, lr, betas, final_lr, prompts, run_dir):
    """So it does whatever the values: no digit is lost, and no string is taken for something else."""
    config = Config(
        data=DataConfig(prompts=prompts),
        optim=OptimConfig(lr=lr, betas=betas, final_lr=final_lr),
        seed=seed,
        run_dir=run_dir,
    )
    assert validate(to_plain(config)) == config
    assert write_and_read(config, tmp_path_factory.getbasetemp() / "config.yaml") == config


def test_validate_leaves_its_argument_alone():
    """Checking does not change what it checks."""
    values = {"trainer": {"compile": "TRUE", "log_every": 1e1}, "seed": 3}
    validate(values)
    assert values == {"trainer": {"compile": "TRUE", "log_every": 1e1}, "seed": 3}


def test_what_is_not_given_has_its_default():
    """An empty configuration is the default one, and what is given changes nothing else."""
    assert validate({}) == Config()
    assert validate({"trainer": {"log_every": 3}}) == Config(trainer=TrainerConfig(log_every=3))
    sections = {"model": ModelConfig, "data": DataConfig, "tokenizer": TokenizerConfig, "optim": OptimConfig}
    assert all(getattr(Config(), name) == section() for name, section in sections.items())


# --- suggestions ---


@pytest.mark.parametrize(
    ("key", "suggested"),
    [
        ("optim.lrr", "optim.lr"),
        ("optm.lr", "optim.lr"),
        ("model.dmodel", "model.d_model"),
        ("trainer.tokens_per_stp", "trainer.tokens_per_step"),
        ("horzon", "horizon"),
        ("lr", "optim.lr"),
        ("context_length", "model.context_length"),
        ("model.warmup_steps", "optim.warmup_steps"),
    ],
)
def test_unknown_key_suggests_the_nearest(key, suggested):
    """A misspelt key, or the right one in the wrong place, gets the key that was meant."""
    assert unknown_key(key) == f"there is no key {key!r}; did you mean {suggested!r}?"


@pytest.mark.parametrize("key", ["zzz", "trainers", "learning", "trainer.gradient_buckets_of_mine"])
def test_unknown_key_without_a_near_one(key):
    """Where nothing is near, no guess: the line says where to look."""
    assert unknown_key(key) == f"there is no key {key!r}; see configs/ for the keys there are"


def test_every_key_is_suggested():
    """Each key is the suggestion for a slip in it."""
    for key in leaves(to_plain(Config())):
        assert unknown_key(key + key[-1]) == f"there is no key {key + key[-1]!r}; did you mean {key!r}?"
