"""model=auto: what it chooses, says and expects, and the law that it goes by."""

import json
import math
import re

import pytest
import yaml

from gpt.model.transformer import ModelConfig
from gpt.training import auto_model
from gpt.training.config import Config
from gpt.training.finalize import find_candidates
from gpt.training.request import Request
from gpt.training.scaling_law import CANDIDATE_MODELS, PROBE_MODEL, ScalingLaw
from gpt.training.schedule import Schedule
from gpt.training.start import load_dataset, open_dataset
from gpt.training.timing import run_throwaway_steps
from harness import finalize_config, refusal, tiny_arguments, tiny_config, train, train_refusal

TEXT = ScalingLaw(1_000_003)
MINI = ModelConfig()


def test_family():
    """Every member is larger than the one before, has heads of 32 or 64 channels, and one is as large as mini."""
    sizes = [model.num_layers * model.d_model**2 for model in (PROBE_MODEL, *CANDIDATE_MODELS)]
    assert sizes == sorted(set(sizes))
    assert all(model.d_model // model.num_heads == (32 if model.d_model <= 256 else 64) for model in CANDIDATE_MODELS)
    assert [(model.num_layers, model.d_model) for model in CANDIDATE_MODELS].count((MINI.num_layers, MINI.d_model)) == 1


def test_law():
    """More text and more layers help, repeated text helps less, and one that is learnt by heart does harm."""
    assert TEXT.bits_per_byte(MINI, 3e5) > TEXT.bits_per_byte(MINI, 9e5) > TEXT.bits_per_byte(CANDIDATE_MODELS[3], 9e5)
    fresh, again = (TEXT.bits_per_byte(MINI, 1e6 * n) / TEXT.bits_per_byte(MINI, 2e6 * n) for n in (0.5, 5))
    assert fresh > again
    assert TEXT.bits_per_byte(MINI, 2e8) > TEXT.bits_per_byte(MINI, 1e7)
    assert TEXT.best_tokens(MINI, 1e6) == 1e6
    assert TEXT.best_tokens(MINI, 1e9) == pytest.approx(TEXT.best_tokens(MINI, 2e8), rel=0.05)
    assert TEXT.best_tokens(CANDIDATE_MODELS[-1], 1e9) < TEXT.best_tokens(MINI, 1e9)


def test_law_through_a_probe():
    """The law of a text has the value that was measured, wherever that was, and a harder text stays harder."""
    for tokens in (2e5, 1e6):
        easy, hard = (TEXT.calibrate(PROBE_MODEL, tokens, bits) for bits in (1.3, 2.6))
        assert easy.bits_per_byte(PROBE_MODEL, tokens) == pytest.approx(1.3)
        assert hard.bits_per_byte(PROBE_MODEL, tokens) == pytest.approx(2.6)
        assert easy.bits_per_byte(MINI, 3e6) < 1.3 < hard.bits_per_byte(MINI, 3e6) < 2.6
        assert easy.bits_per_byte(CANDIDATE_MODELS[-1], 3e6) > 0


@pytest.mark.parametrize("bits", [0.0, 1e-6, 0.3, 9.0])
def test_law_of_a_strange_text(bits):
    """A text that is learnt at once, or not at all, has numbers to compare as well."""
    for law in (ScalingLaw(1000), TEXT):
        found = law.calibrate(PROBE_MODEL, 3e5, bits)
        reached = [found.bits_per_byte(model, found.best_tokens(model, 1e7)) for model in CANDIDATE_MODELS]
        assert all(isinstance(one, float) and 0 <= one < math.inf for one in reached)


def test_the_probe_of_a_small_text(corpus_folder, monkeypatch):
    """It sees the text five times, where that is enough: more would tell how well it is learnt by heart."""
    config = finalize_config(
        tiny_config(corpus_folder, "trainer.tokens_per_step=48", "optim.lr=0.01", "optim.matrix_lr=0.02")
    )
    dataset, lengths = load_dataset(config), []

    def counted(config, schedule, text):
        lengths.append(schedule.total_steps)
        return run_throwaway_steps(config, schedule, text)

    monkeypatch.setattr(auto_model, "run_throwaway_steps", counted)
    auto_model.probe(config, Schedule(), dataset, 1e9)
    assert lengths == [round(5 * dataset.train_tokens / 48)] and 250 < lengths[0] < 1000


def test_mini_where_a_smaller_one_is_as_good():
    """A smaller model must be clearly better than mini."""
    chosen = {}
    for speed in range(20_000, 80_000, 500):
        small, mini = (
            auto_model.Candidate(Config(model=model), Schedule(), 1, tokens, TEXT)
            for model, tokens in ((CANDIDATE_MODELS[0], speed), (MINI, 20_000))
        )
        better = 1 - small.reached(60)[0] / mini.reached(60)[0]
        chosen[round(100 * better)] = auto_model.pick_best([small, mini], 60) is small
    assert chosen[-1] is chosen[0] is False
    assert chosen[2] is chosen[3] is True


@pytest.fixture
def given(corpus_folder, monkeypatch):
    """The arguments of a tiny run, and a family of models that are as tiny."""
    tiny = [(1, 8), (2, 16), (2, 24), (3, 24), (3, 32)]
    family = tuple(ModelConfig(16, channels, layers, num_heads=2) for layers, channels in tiny)
    monkeypatch.setattr(auto_model, "PROBE", family[0])
    monkeypatch.setattr(auto_model, "FAMILY", family[1:])
    monkeypatch.setattr(auto_model, "PROBE_STEPS", (8, 12))
    return [one for one in tiny_arguments(corpus_folder) if not re.match(r"model\.[dn]|trainer.micro", one)]


def test_chooses_trains_and_reports(given, tmp_path):
    """The chosen member is trained in the time; config.yaml, metrics.json and the table say so; the same resumes."""
    asked = ["model=auto", "horizon=2s", "resume=auto", f"run_dir={tmp_path / 'run'}", *given]
    done = train(*asked)
    line = re.search(
        r"model=auto: (\d+) layers of (\d+) channels, [\d.]+ million parameters, for 2s at [\d,]+ tokens/s on 0.0\d+ "
        r"MB: about ([\d.]+) bits per byte",
        done.stdout,
    )
    assert line, done.stdout
    config = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    model = config["model"]
    assert config["data"]["bpe_dropout"] is not None
    assert config["overrides"]["model"] == "auto"
    assert (model["num_layers"], model["d_model"]) == (int(line[1]), int(line[2]))
    figures = json.loads((tmp_path / "run/metrics.json").read_text())
    assert f"{figures['expected_bits_per_byte']:.2f}" == line[3]
    assert re.search(
        rf"expected +{figures['expected_bits_per_byte']:.4f}  bits per byte, by model=auto; the result is [\d.]+%",
        done.stdout,
    )
    assert figures["train_seconds"] < 4
    assert "is complete" in train(*asked).stdout
    assert "by model=auto" not in train(f"resume={tmp_path / 'run'}", "horizon=3s").stdout


def test_plan(given):
    """A plan weighs the neighbours, and other times; more time never expects more bits."""
    done = train("model=auto", "horizon=2s", "plan=json", *given)
    rows = json.loads(done.stdout)["expected"]
    assert [row["seconds"] for row in rows[-3:]] == [600, 3600, 28800]
    assert len(rows) >= 3 + 3
    bits = [row["bits_per_byte"] for row in rows[-3:]]
    assert bits[0] >= bits[1] * 0.99 >= bits[2] * 0.98


def test_only_memorising(given, tmp_path):
    """Where a text is learnt by heart, the run ends when validation is at its best, and says so."""
    done = train("model=auto", "horizon=9h", "plan=json", *given)
    assert re.search(
        r"for 9h00m at .* bits per byte after [\dmhs]+, and more would only memorise the text", done.stderr
    )
    assert json.loads(done.stdout)["train_seconds"] < 3600


def test_a_member_that_does_not_fit(given, corpus_folder, monkeypatch):
    """Members that memory does not hold are left out; if that is the probe, it is one line."""
    measured = auto_model.measure_step

    def measure_step(config, *others, **options):
        if config.model.d_model > limit:
            raise auto_model.UserError("out of memory")
        return measured(config, *others, **options)

    monkeypatch.setattr(auto_model, "measure_step", measure_step)
    config = tiny_config(corpus_folder, "horizon=1s", "trainer.micro_batch_size=auto")
    limit = 16
    config.model = ModelConfig(config.model.context_length)
    request, machine, dataset, _ = open_dataset(Request(config, model="auto"))
    assert [member.config.model.d_model for member in find_candidates(request, machine, dataset)] == [16]
    limit = 7
    assert refusal(find_candidates, request, machine, dataset) == "out of memory"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["horizon=400steps"], "model=auto needs a time limit: set horizon=10min (not 400steps)"),
        (["horizon=1Mtokens"], "set horizon=10min (not 1Mtokens)"),
        (["horizon=3epochs"], "(not 3epochs)"),
        (["horizon=auto"], "(not auto)"),
        (["horizon=1min", "init_from=gpt2"], "model=auto does not go with init_from, which brings its own model"),
        (["horizon=1min", "model.num_layers=3"], "model.num_layers=3 does not go with model=auto, which chooses it"),
        (["-m", "horizon=1min,400steps"], "job 1 (model=auto horizon=400steps"),
    ],
)
def test_refused(changes, message, tmp_path):
    assert message in train_refusal("model=auto", *changes, f"run_dir={tmp_path / 'run'}")


def test_text_too_short(tmp_path):
    """A text shorter than the context of the smallest member is one line, as for any model."""
    (tmp_path / "short.txt").write_text("too short " * 9)
    path = [f"data.path={tmp_path / 'short.txt'}", f"data.cache={tmp_path / 'cache'}", f"run_dir={tmp_path / 'run'}"]
    assert "model.context_length=" in train_refusal("model=auto", "horizon=1min", *path)


def test_sweep_over_horizons(given, tmp_path):
    """Each job of a sweep makes its own choice."""
    done = train(
        "-m", "model=auto", "horizon=1s,2s", f"hydra.sweep.dir={tmp_path}", f"run_dir={tmp_path}/${{horizon}}", *given
    )
    assert done.stdout.count("model=auto: ") >= 2
