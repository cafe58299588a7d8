"""The configuration: everything shipped composes and holds, and every mistake becomes a line that names its key."""

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
from gpt.training.cli import describe_hydra_error, parse_overrides, to_plain_values
from gpt.training.config import (
    DROPPED,
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
from gpt.training.request import parse_request
from harness import differences, refusal, tiny_arguments, train

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SHIPPED = sorted(f"{file.parent.name}={file.stem}" for file in CONFIGS.glob("*/*.yaml"))
NEEDS_PATH = {"data=text", "data=tokens"}  # they are for what the user names

EXAMPLES = settings(max_examples=100, deadline=None, derandomize=True, database=None)


@functools.cache
def composed(*overrides: str) -> DictConfig:
    """What `python train.py` composes from these arguments."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONFIGS)):
        return compose("train", overrides=list(overrides))


def parsed(*overrides: str) -> Config:
    """The configuration of `python train.py` with these arguments, whose values may contradict each other."""
    return parse_composed(composed(*overrides))


def parse_composed(composition: DictConfig) -> Config:
    values = to_plain_values(composition)
    return parse_config({key: value for key, value in values.items() if key not in ("callbacks", "plan")})


def composed_with_experiment(folder: Path, content: str) -> DictConfig:
    """What an experiment file of this content composes to."""
    (folder / "experiment").mkdir()
    (folder / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{content}\n", encoding="utf-8")
    return composed(f"hydra.searchpath=[file://{folder}]", "experiment=mine")


def with_path(choice: str) -> list[str]:
    return [choice, "data.path=some.txt"] if choice in NEEDS_PATH else [choice]


def write_and_read(config: Config, file: Path) -> Config:
    """The configuration out of the YAML file that a run would keep of it."""
    file.write_text(config_to_yaml(config), encoding="utf-8")
    return load_config(file)


# --- what is shipped ---


@pytest.mark.parametrize("choice", SHIPPED)
def test_shipped_config(choice, tmp_path):
    """Each shipped file composes, is valid, means what it says, and comes back the same from what a run stores."""
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


def test_help():
    """What it says of keys and their defaults is true, and it lists the groups; with no line too wide for a page."""
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
def test_a_path_is_of_text(overrides, name, prompts):
    """Without `data`, in place of the default corpus."""
    config = parse_request(to_plain_values(composed(*overrides)), parse_overrides(overrides)).config
    assert (config.data.name, config.data.prompts) == (name, prompts)


def test_a_path_contradicts_a_corpus():
    """It does not replace a corpus that was chosen."""
    for choice in ("data=python_docs", "experiment=shakespeare"):
        overrides = [choice, "data.path=a.txt"]
        line = refusal(parse_request, to_plain_values(composed(*overrides)), parse_overrides(overrides))
        assert (
            line
            == "data.path='a.txt' works only with data=text and data=tokens: add one of these, or leave the path out"
        )


def test_defaults_hold_every_key():
    """So that each key can be set without a plus, and none is there that the dataclasses lack, but for two."""
    plain = OmegaConf.to_container(composed())
    assert flatten(plain).keys() == Config().settings().keys() | {"callbacks", "plan"}


@pytest.mark.parametrize(
    ("file", "kind"),
    [("model/mini", ModelConfig), ("trainer/default", TrainerConfig), ("optim/muon", OptimConfig)],
)
def test_files_that_repeat_the_defaults(file, kind):
    """Three files show every key of their group, with the values that the dataclass has."""
    shown = read_yaml(CONFIGS / f"{file}.yaml")
    assert shown == dataclasses.asdict(kind())


def test_experiments_choose_their_groups():
    """What an experiment says of other groups holds, and the command line has the last word."""
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
    """Each model's size, counted without allocating it; GPT-2's are the published ones, which their files name."""
    shape = parsed(f"model={name}", "trainer.tokens_per_step=1024").model
    assert GPTConfig(vocab_size=vocab_size, **dataclasses.asdict(shape)).num_parameters == expected
    stated = f"{expected / 1e6:.1f} million" if name == "mini" else f"{expected:,}"
    assert stated in (CONFIGS / "model" / f"{name}.yaml").read_text(encoding="utf-8")


# --- mistakes ---


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("optim:\n  lrr: 3", "there is no key 'optim.lrr'; did you mean 'optim.lr'?"),
        ("horzon: 3steps", "there is no key 'horzon'; did you mean 'horizon'?"),
        ("modle:\n  d_model: 64", "there is no key 'modle'; see docs/configuration.md for the keys there are"),
        ("model:\n  d_model: null", "model.d_model=None is not of type int"),
        ("model: null", "model=None stands where keys such as model.context_length belong"),
        ("optim:\n  betas: [0.9, x]", "optim.betas[1]='x' is not of type float"),
        ("seed: 1.5", "seed=1.5 is not of type int"),
    ],
)
def test_mistakes_in_a_file(tmp_path, content, line):
    """A wrong name or type in a YAML file is one line that names the key."""
    assert refusal(parse_composed, composed_with_experiment(tmp_path, content)) == line


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("++trainer.log_evry=3", "there is no key 'trainer.log_evry'; did you mean 'trainer.log_every'?"),
        ("+model.vocab_size=5", "there is no key 'model.vocab_size'; did you mean 'tokenizer.vocab_size'?"),
        ("model.d_model=true", "model.d_model=True is not of type int"),
        ("model.dropout=high", "model.dropout='high' is not of type float"),
        ("model.qkv_bias=maybe", "model.qkv_bias='maybe' is not of type bool"),
        ("data.text_field=null", "data.text_field=None is not of type str"),
        ("data.text_field=[a]", "data.text_field=['a'] is not of type str"),
        ("optim.betas=null", "optim.betas=None is not of type list"),
        ("optim.lr=true", "optim.lr=True is not of type float"),
    ],
)
def test_mistakes_on_the_command_line(override, line):
    """So it is on the command line, with a plus too."""
    assert refusal(parse_composed, composed(override)) == line


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("d_model=64", r"'d_model'; did you mean 'model\.d_model'"),
        ("modle=mini", r"'modle'"),
        (
            "model=gpt3",
            r"^model=gpt3 .*choose from auto, gpt2_large, gpt2_medium, gpt2_small, gpt2_xl, mini, mini_128$",
        ),
        ("experiment=mine", r"^experiment=mine .*choose from finetune, gpt2_small, shakespeare$"),
        ("data.path=a=b", r"^'data\.path=a=b' is not key=value.*quotes"),
    ],
)
def test_mistakes_that_hydra_refuses(override, message):
    """What Hydra itself refuses, train.py says in a line that names the key too."""
    with pytest.raises(HydraException) as caught:
        composed(override)
    line = describe_hydra_error(caught.value)
    assert "\n" not in line
    assert re.search(message, line)


def test_experiment_without_its_first_line(tmp_path):
    """One that chooses groups fails in Hydra, which then names neither the file's fault nor the remedy."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text("# mine\n# @package _global_\ndefaults:\n  - override /data: text\n")
    with pytest.raises(HydraException) as caught:
        composed(f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine")
    assert describe_hydra_error(caught.value) == "an experiment file must begin with the line: # @package _global_"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": {"d_model": 130, "num_heads": 4}}, r"model\.d_model=130 .*model\.num_heads=4.*d_model=132"),
        ({"model": {"context_length": 0}}, r"model\.context_length=0 .*at least 1"),
        ({"model": {"dropout": 1.0}}, r"model\.dropout=1\.0 .*at least 0 and below 1"),
        ({"tokenizer": {"vocab_size": 256}}, r"tokenizer\.vocab_size=256 .*at least 257 .*at most 1000000"),
        ({"tokenizer": {"name": "char"}}, r"tokenizer\.name='char' .*choose from bpe, gpt2, byte"),
        ({"data": {"name": "web"}}, r"data\.name='web' .*choose from python_docs, python_stdlib, tinyshakespeare"),
        ({"data": {"name": "text"}}, r"data\.path=FILE"),
        ({"data": {"path": "a.txt"}}, r"data\.path='a\.txt' .*data=text"),
        ({"data": {"name": "tokens"}}, r"data=tokens needs data\.path=DIR"),
        ({"data": {"name": "mix", "path": "a.txt", "weights": [1]}}, r"data=mix needs .* two different corpora"),
        ({"data": {"name": "mix", "path": ["a", "a"], "weights": [1, 2]}}, r"data=mix needs .* two different corpora"),
        ({"data": {"name": "mix", "path": ["a", "b"], "weights": [1]}}, r"data\.weights=\[1\.0\] does not fit"),
        ({"data": {"name": "text", "path": ["a", "b"], "weights": [1, 1]}}, r"data\.weights=.* does not fit"),
        ({"data": {"name": "mix", "path": ["a", "b"], "weights": [1, 0]}}, r"data\.weights=.* must be above 0"),
        ({"data": {"errors": "ignore"}}, r"data\.errors='ignore' .*choose from strict, replace"),
        ({"data": {"validation_bytes": 2 * 10**9}}, r"data\.validation_bytes=2000000000 .*at most 1000000000"),
        ({"data": {"cache_bytes": 0}}, r"data\.cache_bytes=0 .*at least 1"),
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
        ({"optim": {"name": "sgd"}}, r"optim\.name='sgd' .*choose from muon, adamw"),
        ({"optim": {"schedule": "step"}}, r"optim\.schedule='step' .*choose from linear, cosine, constant"),
        ({"optim": {"lr": 0.0}}, r"optim\.lr=0\.0 .*above 0 and at most 10"),
        ({"optim": {"lr": float("nan")}}, r"optim\.lr=nan .*above 0 and at most 10"),
        ({"optim": {"matrix_lr": 11.0}}, r"optim\.matrix_lr=11\.0 .*above 0 and at most 10"),
        ({"optim": {"weight_decay": -0.1}}, r"optim\.weight_decay=-0\.1 .*at least 0"),
        ({"optim": {"matrix_weight_decay": -0.1}}, r"optim\.matrix_weight_decay=-0\.1 .*at least 0"),
        ({"optim": {"clip": -1.0}}, r"optim\.clip=-1\.0 .*at least 0"),
        ({"optim": {"warmup_steps": -1}}, r"optim\.warmup_steps=-1 .*at least 0"),
        ({"optim": {"momentum": 1.1}}, r"optim\.momentum=1\.1 .*at least 0 and below 1"),
        ({"optim": {"decay_from": 1.1}}, r"optim\.decay_from=1\.1 .*at least 0 and at most 1"),
        ({"optim": {"final_lr": -0.1}}, r"optim\.final_lr=-0\.1 .*at least 0 and at most 1"),
        ({"optim": {"betas": [0.9, 1.0]}}, r"optim\.betas=\[0\.9, 1\.0\] .*at least 0 and below 1"),
        ({"optim": {"betas": [0.9]}}, r"optim\.betas=\[0\.9\] .*two numbers"),
        ({"seed": -1}, r"seed=-1 .*at least 0 and below 2\^63"),
        ({"seed": 2**63}, r"seed=9223372036854775808 .*below 2\^63"),
        ({"horizon": 1000}, r"horizon='1000' .*a unit"),
        ({"horizon": "0steps"}, r"horizon='0steps' .*above 0"),
        ({"trainer": {"strategy": "fsdp"}}, r"trainer\.strategy='fsdp' .*choose from auto, ddp"),
        ({"logger": ["csv", "comet"]}, r"logger='comet' .*choose from tensorboard, csv, wandb, mlflow"),
    ],
)
def test_values_out_of_range(values, message):
    """A value out of its range is an error that names the key, the value and the limit."""
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
def test_tokens_per_step_must_divide(trainer, message):
    """Steps are whole sequences on every device, and whole micro-batches; the remedy named is valid."""
    with pytest.raises(UserError, match=message) as caught:
        parse_config({"model": {"context_length": 64}, "trainer": trainer})
    if "try" in str(caught.value):
        trainer = trainer | {"tokens_per_step": int(str(caught.value).split("try ")[1])}
        parse_config({"model": {"context_length": 64}, "trainer": trainer})


def test_interpolation_is_a_mistake_of_the_user():
    """A reference to a key that does not exist is the user's error, and names where it stands."""
    composition = OmegaConf.create({"data": {"prompts": ["${nowhere}"]}})
    assert refusal(to_plain_values, composition).startswith("data.prompts[0]: ")


@pytest.mark.promise("security.md#Configurations in checkpoints")
@pytest.mark.parametrize(
    "text", ["${oc.env:HOME}", "\\${oc.env:HOME}", "a ${nowhere} b", "\\\\${x}", "${", "$", "\\", "???"]
)
def test_stored_configurations_are_literal(text, tmp_path):
    """What a checkpoint or a config.yaml says is never interpolated: it cannot read the environment, nor be missing."""
    config = parse_config({"data": {"prompts": [text]}})
    assert config.data.prompts == [text]
    (tmp_path / "config.yaml").write_text(config_to_yaml(config))
    assert load_config(tmp_path / "config.yaml").data.prompts == [text]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("model: {", "cannot be read"),
        ("horizon: 3steps", "holds no configuration of a run"),
        ("[model]", "holds no configuration of a run"),
        ("model: 3", "model=3 stands where keys such as model.context_length belong"),
    ],
)
def test_stored_file_that_is_none(tmp_path, content, words):
    """A config.yaml that holds something else is refused."""
    (tmp_path / "config.yaml").write_text(content)
    assert words in refusal(load_config, tmp_path / "config.yaml")


@pytest.mark.parametrize("stored", [[], 3, None, "text"])
def test_configuration_that_is_no_dictionary(stored):
    """A checkpoint's configuration of another type is one line."""
    assert "stands where keys such as model belong" in refusal(parse_config, stored)


# --- numbers as people write them ---


def test_numbers_and_words_as_yaml_reads_them():
    """`compile: true` is a bool to YAML, and 1e3 a float; both are taken as what their keys want."""
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
    """Every unit, singular and plural, with its factor."""
    assert parse_horizon(text) == Horizon(amount, unit)


MALFORMED = """
    3 steps 0steps 0.0h -3steps +3steps 1e3steps 1_000steps 1,000steps .5h 5.h 3m 3sec 3hours 1day 100mtokens 3Ksteps
    3kepochs 3Ms 3Steps 3stepss nansteps infsteps
"""


@pytest.mark.parametrize("text", ["", *MALFORMED.split(), "3 steps each", "3st eps", "3steps 4steps"])
def test_malformed_horizons(text):
    """Anything else is refused by a line with the value and examples that are themselves horizons."""
    line = refusal(parse_horizon, text)
    assert line.startswith(f"horizon={text!r} is not a horizon: ")
    examples = line.split("such as ")[1].replace(" or ", ", ").split(", ")
    assert len(examples) == 6
    assert all(parse_horizon(example).amount > 0 for example in examples)


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


def test_plain_values_are_plain():
    """What goes into checkpoints and YAML files is of Python's own types throughout."""
    plain = dataclasses.asdict(parsed())
    assert type(plain["optim"]) is dict
    flat = [item for value in flatten(plain).values() for item in (value if isinstance(value, list) else [value])]
    assert {type(item) for item in flat} == {str, int, float, bool, type(None)}


@settings(EXAMPLES, max_examples=30)
@given(
    seed=st.integers(0, 2**63 - 1),
    lr=st.floats(0, 10, exclude_min=True),
    betas=st.lists(st.floats(0, 1, exclude_max=True), min_size=2, max_size=2),
    final_lr=st.floats(0, 1),
    prompts=st.lists(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\x85"), max_size=12)),
    run_dir=st.sampled_from([None, "runs/a", "null", "true", "1e3", "0x10", "1:30", "2026-01-01", "~", "no", "#"]),
)
def test_round_trip_of_any_values(tmp_path_factory, seed, lr, betas, final_lr, prompts, run_dir):
    """So it does whatever the values: no digit is lost, and no string is taken for something else."""
    config = Config(
        data=DataConfig(prompts=prompts),
        optim=OptimConfig(lr=lr, betas=betas, final_lr=final_lr),
        seed=seed,
        run_dir=run_dir,
    )
    assert parse_config(dataclasses.asdict(config)) == config
    assert write_and_read(config, tmp_path_factory.getbasetemp() / "config.yaml") == config


def test_validate_leaves_its_argument_alone():
    """Checking does not change what it checks."""
    values = {"trainer": {"compile": "TRUE", "log_every": 1e1}, "seed": 3}
    parse_config(values)
    assert values == {"trainer": {"compile": "TRUE", "log_every": 1e1}, "seed": 3}


def test_what_is_not_given_has_its_default():
    """An empty configuration is the default one, and what is given changes nothing else."""
    assert parse_config({}) == Config()
    assert parse_config({"trainer": {"log_every": 3}}) == Config(trainer=TrainerConfig(log_every=3))
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
        *((key + key[-1], key) for key in Config().settings()),
    ],
)
def test_unknown_key_suggests_the_nearest(key, suggested):
    """A misspelt key, or the right one in the wrong place, gets the key that was meant."""
    assert describe_unknown_key(key) == f"there is no key {key!r}; did you mean {suggested!r}?"


def test_keys_that_went_name_what_to_use():
    """Each is no key any more, and has a substitute."""
    keys = [key for key in DROPPED if "=" not in key]
    assert keys
    for key in keys:
        assert key not in Config().settings()
        assert refusal(parse_config, {key: 1} if "." not in key else {"trainer": {key.split(".")[1]: 1}}) == (
            f"there is no key {key!r} since version 1.0: use {DROPPED[key]}"
        )


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"data": {"name": "text", "path": "caf\udce9.txt"}}, r"data.path='caf\udce9.txt'"),
        ({"data": {"name": "text", "path": ["a.txt", "caf\udce9.txt"]}}, r"data.path=['a.txt', 'caf\udce9.txt']"),
        ({"data": {"prompts": ["half a pair: \ud83d"]}}, r"data.prompts=['half a pair: \ud83d']"),
        ({"run_dir": "r\udce9"}, r"run_dir='r\udce9'"),
    ],
)
def test_bytes_that_are_not_utf8(values, line):
    """Whatever key has them is named, since config.yaml could not hold it."""
    assert refusal(parse_config, values) == f"{line} has bytes that are not UTF-8: give it another name"


@pytest.mark.slow
def test_saved_compositions(corpus_folder, tmp_path, monkeypatch):
    """What --cfg job prints, and the config.yaml of a run, are configurations like those in configs/."""
    monkeypatch.chdir(tmp_path)
    words = tiny_arguments(corpus_folder, "horizon=2steps")
    Path("saved.yaml").write_text(train(*words, "run_dir=first", "--cfg", "job").stdout)
    train("--config-dir", ".", "--config-name", "saved")
    train("--config-dir", "first", "--config-name", "config", "run_dir=second")
    assert differences(Path("first"), Path("second")) == []
