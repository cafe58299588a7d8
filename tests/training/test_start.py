"""A new run: every setting is final and recorded, and its weights come from a seed or from a checkpoint."""

import re
import weakref

import pytest

from gpt.loading import open_model
from gpt.training import loop
from gpt.training.batch_loader import micro_batch
from gpt.training.config import load_config
from gpt.training.finalize import check_machine
from gpt.training.module import GPTModule
from gpt.training.request import Request
from gpt.training.schedule import Schedule
from gpt.training.start import load_dataset
from harness import CallAt, begin_run, finalize_config, fit, refusal, resume_run, tiny_config


def test_every_setting_is_final_and_recorded(corpus_folder, tmp_path):
    """config.yaml has the final values and what the user set, also for a run that starts again without a checkpoint."""
    changes = ["trainer.micro_batch_size=auto", "data.prompts=null", f"run_dir={tmp_path / 'run'}"]
    training = begin_run(tiny_config(corpus_folder, *changes))
    training.run.close()
    config = training.config
    assert "auto" not in (config.trainer.device, config.trainer.precision, config.trainer.compile)
    assert config.trainer.micro_batch_size == 6 and config.can_shrink_micro_batch
    assert None not in (config.data.bpe_dropout, config.data.prompts)
    overrides = {"trainer.micro_batch_size": "auto", "data.prompts": None, "run_dir": str(tmp_path / "run")}
    assert config.overrides == overrides
    assert load_config(training.path / "config.yaml") == config
    again = resume_run(training.path)
    again.run.close()
    assert again.config.can_shrink_micro_batch


def test_seeds_draw_weights_and_order(corpus_folder):
    """`seed` draws the initial weights. It draws the order of sequences, too, unless `data.seed` is given."""

    def draw(*changes: str) -> tuple[bytes, bytes]:
        config = tiny_config(corpus_folder, "horizon=6steps", *changes)
        config = finalize_config(config)
        dataset = load_dataset(config, quiet=True)
        module = GPTModule(config, dataset.tokenizer, Schedule.plan(config, dataset.train_tokens))
        weights = module.model.position_embedding.weight.detach().numpy().tobytes()
        return weights, micro_batch(config, dataset, 0, 16)[0].numpy().tobytes()

    default, both, order = draw("seed=1"), draw("seed=1", "data.seed=1"), draw("seed=1", "data.seed=2")
    assert default == both
    assert order[0] == default[0] and order[1] != default[1]
    other = draw("seed=2")
    assert other[0] != default[0] and other[1] == order[1]
    assert draw("seed=2", "data.seed=1") == (other[0], default[1])
    assert "data.seed=-1 is out of range" in refusal(tiny_config, corpus_folder, "data.seed=-1")


@pytest.mark.promise("runs.md#released before the first step")
def test_initial_weights_are_released(corpus_folder, trained, tmp_path, monkeypatch):
    """The model that a run starts from takes no memory while the run trains."""
    references: list[weakref.ref] = []

    def open_and_refer(path, quiet):
        model, tokenizer = open_model(path, quiet)
        references.append(weakref.ref(model.token_embedding.weight))
        return model, tokenizer

    monkeypatch.setattr(loop, "open_model", open_and_refer)
    exists: list[bool] = []
    count = CallAt(1, lambda: exists.extend(reference() is not None for reference in references))
    changes = [f"init_from={trained.path}", "horizon=1steps", f"run_dir={tmp_path / 'run'}"]
    fit(begin_run(tiny_config(corpus_folder, *changes)), [count])
    assert exists == [False]


@pytest.mark.parametrize(
    ("changes", "probability"),
    [
        ([], 0.5),
        (["horizon=9min"], 0.5),
        (["init_from=run"], 0.0),
        (["init_from=run", "data.bpe_dropout=0.3"], 0.3),
    ],
)
def test_bpe_dropout_suits_the_epochs(corpus_folder, trained, tmp_path, monkeypatch, changes, probability):
    """A text that is seen often has some. Trained weights have none unless the user gives it."""
    monkeypatch.chdir(trained.path.parent)
    training = begin_run(tiny_config(corpus_folder, "horizon=900steps", f"run_dir={tmp_path / 'run'}", *changes))
    training.run.close()
    assert training.config.data.bpe_dropout == probability


def test_too_many_devices_are_refused(corpus_folder, monkeypatch):
    """The line has the number of devices of this machine."""
    config = tiny_config(corpus_folder, "trainer.devices=2", "trainer.micro_batch_size=auto")
    monkeypatch.setattr("gpt.training.finalize.device_count", lambda device: 1)
    assert (
        refusal(check_machine, Request(config)) == "trainer.devices=2 is more than this machine has: at most 1 of cpu"
    )


def test_too_short_a_text_is_refused(corpus_folder, tmp_path):
    """The line has the settings with which the text is long enough."""
    (tmp_path / "short.txt").write_text("To be, or not")
    config = tiny_config(corpus_folder, f"data.path={tmp_path / 'short.txt'}", f"data.cache={tmp_path / 'cache'}")
    line = refusal(load_dataset, config)
    assert re.search(r"or set model\.context_length=\d+ trainer\.tokens_per_step=\d+ or less", line)
