"""model=auto: what it chooses, prints and predicts, and its scaling law."""

import json
import re

import pytest
import yaml

from gpt.errors import UserError
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

LAW = ScalingLaw(1_000_003)
MINI = ModelConfig()


@pytest.mark.parametrize("tokens", [2e5, 1e6])
def test_calibrated_law_predicts_the_measured_loss(tokens):
    for bits in (1.3, 2.6):
        law = LAW.calibrate(PROBE_MODEL, tokens, bits)
        assert law.bits_per_byte(PROBE_MODEL, tokens) == pytest.approx(bits)


@pytest.mark.slow
def test_probe_of_a_small_text_sees_it_five_times(corpus_folder, monkeypatch):
    """A longer probe would measure how well the model memorizes it."""
    config = finalize_config(
        tiny_config(corpus_folder, "trainer.tokens_per_step=48", "optim.lr=0.01", "optim.matrix_lr=0.02")
    )
    dataset, lengths = load_dataset(config), []

    def count_steps(config, schedule, dataset):
        lengths.append(schedule.total_steps)
        return run_throwaway_steps(config, schedule, dataset)

    monkeypatch.setattr(auto_model, "run_throwaway_steps", count_steps)
    auto_model.probe_dataset(config, Schedule(), dataset, 1e9)
    assert lengths == [round(5 * dataset.train_tokens / 48)] and 250 < lengths[0] < 1000


@pytest.mark.parametrize(("tokens_per_second", "is_small"), [(20_000, False), (200_000, True)])
def test_mini_wins_over_a_smaller_model_unless_that_is_clearly_better(tokens_per_second, is_small):
    small, mini = (
        auto_model.Candidate(Config(model=model), Schedule(), 1, speed, LAW)
        for model, speed in ((CANDIDATE_MODELS[0], tokens_per_second), (MINI, 20_000))
    )
    assert (auto_model.pick_best([small, mini], 60) is small) == is_small


@pytest.fixture
def arguments(corpus_folder, monkeypatch):
    """The arguments of a tiny run, with candidates that are as tiny."""
    tiny = [(1, 8), (2, 16), (2, 24), (3, 24), (3, 32)]
    models = tuple(ModelConfig(16, channels, layers, num_heads=2) for layers, channels in tiny)
    monkeypatch.setattr(auto_model, "PROBE_MODEL", models[0])
    monkeypatch.setattr(auto_model, "CANDIDATE_MODELS", models[1:])
    monkeypatch.setattr(auto_model, "MIN_PROBE_STEPS", 8)
    monkeypatch.setattr(auto_model, "MAX_PROBE_STEPS", 12)
    return [word for word in tiny_arguments(corpus_folder) if not re.match(r"model\.[dn]|trainer.micro", word)]


@pytest.mark.slow
def test_chosen_model_trains_in_the_time_and_is_reported(arguments, tmp_path):
    """config.yaml and metrics.json record the choice. The same command finds the run complete."""
    words = ["model=auto", "horizon=2s", "resume=auto", f"run_dir={tmp_path / 'run'}", *arguments]
    done = train(*words)
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
    assert "is complete" in train(*words).stdout
    assert "by model=auto" not in train(f"resume={tmp_path / 'run'}", "horizon=3s").stdout


@pytest.mark.slow
def test_plan_predicts_candidates_and_other_times(arguments):
    """More time never predicts a higher loss."""
    done = train("model=auto", "horizon=2s", "plan=json", *arguments)
    rows = json.loads(done.stdout)["expected"]
    assert [row["seconds"] for row in rows[-3:]] == [600, 3600, 28800]
    assert len(rows) >= 3 + 3
    bits = [row["bits_per_byte"] for row in rows[-3:]]
    assert bits[0] >= bits[1] * 0.99 >= bits[2] * 0.98


@pytest.mark.slow
def test_run_ends_before_it_only_memorizes(arguments):
    done = train("model=auto", "horizon=9h", "plan=json", *arguments)
    assert re.search(
        r"for 9h00m at .* bits per byte after [\dmhs]+; training longer would only memorize the text", done.stderr
    )
    assert json.loads(done.stdout)["train_seconds"] < 3600


def test_candidates_that_do_not_fit_into_memory_are_left_out(arguments, corpus_folder, monkeypatch):
    """If the probe does not fit, the run ends with one line."""
    real_measure_step = auto_model.measure_step

    def measure_step(config, *arguments, **options):
        if config.model.d_model > max_d_model:
            raise UserError("out of memory")
        return real_measure_step(config, *arguments, **options)

    monkeypatch.setattr(auto_model, "measure_step", measure_step)
    config = tiny_config(corpus_folder, "horizon=1s", "trainer.micro_batch_size=auto")
    config.model = ModelConfig(config.model.context_length)
    request, machine, dataset, _ = open_dataset(Request(config, model="auto"))
    max_d_model = 16
    assert [candidate.config.model.d_model for candidate in find_candidates(request, machine, dataset)] == [16]
    max_d_model = 7
    assert refusal(find_candidates, request, machine, dataset) == "out of memory"


def test_text_shorter_than_the_smallest_context_is_refused(tmp_path):
    (tmp_path / "short.txt").write_text("too short " * 9)
    path = [f"data.path={tmp_path / 'short.txt'}", f"data.cache={tmp_path / 'cache'}", f"run_dir={tmp_path / 'run'}"]
    assert "model.context_length=" in train_refusal("model=auto", "horizon=1min", *path)
