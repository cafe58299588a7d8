"""Short sequences: until 0.6 of a run, a step has more but shorter sequences."""

import numpy as np
import pytest
import torch

from gpt import checkpoint, evaluate
from gpt.api import read_curves
from gpt.data.batches import validation_batches
from gpt.model.loss import IGNORE_INDEX
from gpt.sampling.scoring import score
from gpt.training.batch_loader import micro_batch
from gpt.training.module import GPTModule
from gpt.training.start import load_dataset
from harness import StopAt, begin_run, finalize_config, fit, refusal, resume_run, tiny_config


class Lengths:
    """Records the sequence length of each step."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def on_train_step_end(self, module) -> None:
        self.lengths.append(module.sequence_length)


@pytest.mark.parametrize(("setting", "length"), [(8, 8), (4, 4), (0, 16)])
def test_sequences_are_short_from_the_second_step_to_three_fifths(corpus_folder, tmp_path, setting, length):
    """The first step has full length, so that a lack of memory shows at once."""
    lengths = Lengths()
    changes = [f"trainer.short_sequences={setting}", f"run_dir={tmp_path / 'run'}"]
    fit(begin_run(tiny_config(corpus_folder, "horizon=10steps", *changes)), [lengths])
    assert lengths.lengths == [16, *[length] * 5, *[16] * 4]


def test_short_sequences_by_default(corpus_folder, trained, tmp_path):
    """By default, only a context of 256 with random weights has short sequences."""
    long = [
        "horizon=1steps",
        "trainer.tokens_per_step=512",
        "trainer.micro_batch_size=1",
        "trainer.short_sequences=null",
    ]
    for context, expected in (("256", 128), ("128", 0), ("512", 0)):
        changes = [*long, f"model.context_length={context}"]
        assert finalize_config(tiny_config(corpus_folder, *changes)).trainer.short_sequences == expected
    tuned = tiny_config(corpus_folder, *long, "model.context_length=256", f"init_from={trained.path}")
    assert finalize_config(tuned).trainer.short_sequences == 0


def test_length_must_divide_the_context(corpus_folder):
    """The line has both lengths."""
    line = refusal(tiny_config, corpus_folder, "trainer.short_sequences=5")
    assert line.startswith("trainer.short_sequences=5 does not divide model.context_length=16: ")


def test_validation_has_the_length_of_the_last_step(corpus_folder, tmp_path, capsys):
    """The loss is for the length of the last step. gpt.evaluate warns about a model of short sequences only."""
    changes = ["horizon=10steps", "trainer.validate_every=6", f"run_dir={tmp_path / 'run'}"]
    training = begin_run(tiny_config(corpus_folder, *changes))
    fit(training, [StopAt(6)])
    arguments = ["--checkpoint", str(training.path), "--text", str(corpus_folder / "corpus.txt"), "--json"]
    evaluate.main(arguments)
    assert "was trained only on sequences of 8 tokens; from 0.6 of its horizon on" in capsys.readouterr().err
    module = GPTModule(training.config, training.spec.dataset.tokenizer, training.schedule)
    module.load_state_dict(checkpoint.load_checkpoint(training.path / "checkpoints/last.ckpt")["state_dict"])
    [loss] = [value for step, value in read_curves(training.path)["val/loss"] if step == 6]
    [source] = training.spec.dataset.sources
    for length, is_equal in ((8, True), (16, False)):
        expected = score(module.model, validation_batches(source.validation, 1, length, IGNORE_INDEX), 1).nats_per_token
        assert (loss == pytest.approx(expected, rel=1e-5)) == is_equal
    fit(resume_run(training.path))
    evaluate.main(arguments)
    assert "was trained only on sequences of" not in capsys.readouterr().err


@pytest.mark.parametrize(("horizon", "end", "full_length_from_step"), [(20, 5, 12), (20, 6, 6), (7, 5, 5)])
def test_short_sequences_do_not_come_back(corpus_folder, tmp_path, horizon, end, full_length_from_step):
    """After full length, an extended run has no short sequences. Before, they last until 0.6 of the new horizon."""
    fit(begin_run(tiny_config(corpus_folder, "horizon=10steps", f"run_dir={tmp_path / 'run'}")), [StopAt(end)])
    training, lengths = resume_run(tmp_path / "run", f"{horizon}steps"), Lengths()
    assert training.schedule.full_length_from_step == full_length_from_step
    fit(training, [lengths])
    assert lengths.lengths == [8] * (full_length_from_step - end) + [16] * (horizon - max(end, full_length_from_step))


def test_best_checkpoint_is_the_best_at_full_length(corpus_folder, tmp_path):
    """The first validation at full length becomes the best, even if its loss is higher."""

    class Spoil:
        def on_train_step_end(self, step, module) -> None:
            if step == 7:
                with torch.no_grad():
                    module.model.token_embedding.weight.normal_()

    changes = ["horizon=10steps", "trainer.validate_every=2", f"run_dir={tmp_path / 'run'}"]
    training = begin_run(tiny_config(corpus_folder, *changes))
    fit(training, [Spoil()])
    losses = dict(read_curves(training.path)["val/loss"])
    assert losses.keys() == {2, 4, 6, 8, 10}
    assert max(losses[2], losses[4], losses[6]) < min(losses[8], losses[10])
    best = checkpoint.load_checkpoint(training.path / "checkpoints/best.ckpt")
    assert training.metrics["best_val_loss"] == pytest.approx(min(losses[8], losses[10]))
    assert training.metrics["best_step"] == best["step"] == best["state"]["best_step"] > 6


def test_short_sequences_cover_the_same_text(corpus_folder):
    """An epoch covers the text once at either length, except for the remainder that does not fill a step."""
    config = finalize_config(tiny_config(corpus_folder))
    dataset = load_dataset(config, quiet=True)
    [train] = (source.train for source in dataset.sources)
    T = config.model.context_length
    expected = np.bincount(train[np.arange(len(train))], minlength=257)
    num_batches = len(train) // T // 3  # in an epoch
    for length in (T, T // 2):
        batches = [micro_batch(config, dataset, i, length) for i in range(num_batches)]
        assert {tuple(idx.shape) for idx, _ in batches} == {(3 * T // length, length)}
        counts = np.bincount(torch.cat([idx for idx, _ in batches]).flatten(), minlength=257)
        assert np.abs(expected - counts).sum() < 4 * T
        assert all(torch.equal(idx[:, 1:], targets[:, :-1]) for idx, targets in batches)
