"""Everything that follows a training step, by name and in order: one Lightning callback, the last in the list."""

import math
import time
from dataclasses import asdict

import torch
from lightning import Callback, Trainer

from gpt.errors import NonFiniteError
from gpt.exchange.checkpoint import FORMAT
from gpt.sampling.scoring import sum_of
from gpt.training.distributed.launch import is_rank_0
from gpt.training.metrics.alarms import look_for_explosion, look_for_memorising
from gpt.training.metrics.curves import Curves
from gpt.training.metrics.loggers import UserCurves
from gpt.training.metrics.metrics import Metrics
from gpt.training.metrics.progress import Progress
from gpt.training.metrics.samples import Samples
from gpt.training.metrics.validation import score_on_all_ranks
from gpt.training.module import REMEDY, GPTModule
from gpt.training.run.clock import Clock
from gpt.training.run.code import versions
from gpt.training.run.run import Run
from gpt.training.run.signals import StopSignals
from gpt.training.trainer import leave_signals, restore_counters, restore_module


class Loop(Callback):
    """Runs what belongs to a run after each step: clock, curves, validation, whether to stop, checkpoint, progress.

    Users' callbacks come before it, as Lightning calls them in order.
    """

    def __init__(
        self,
        run: Run,
        clock: Clock,
        curves: Curves,
        user_curves: UserCurves,
        signals: StopSignals,
        config_changed: bool,
    ):
        self.run, self.clock, self.curves, self.user_curves = run, clock, curves, user_curves
        self.samples, self.metrics = Samples(run, curves), Metrics(run, curves)
        self.progress = Progress(run, curves)
        self._signals = signals
        self._config_changed = config_changed  # since the newest checkpoint
        self._wish = False  # of a callback to stop, perhaps on this rank alone
        self._is_whole = False  # whether all that belongs to the last step is done, so that it can be saved
        self._saved, self._saved_at = -1, 0.0  # the step of last.ckpt, and when it was written
        self._saving = False  # stays true where that has failed
        self._validated = -1  # the step of the last validation
        self.step = 0  # the last that is whole
        self.stopped_by = 0  # the signal that ended the run early
        self.stopped_at, self.by_patience = 0, False  # the step after which it ended early, and why

    # --- before the first step ---

    def setup(self, trainer: Trainer, module: GPTModule, stage: str) -> None:  # type: ignore[override]
        self._signals.install()
        if self.run.payload is not None:
            restore_module(trainer, module, self.run)

    def on_fit_start(self, trainer: Trainer, module: GPTModule) -> None:  # type: ignore[override]
        if self.run.payload is not None:
            restore_counters(trainer, self.run)
            self.run.payload = None  # nothing large stays referenced while training
        if is_rank_0():
            self.run.cut_back(self.run.state.sizes)
        self.curves.open(trainer.global_step)

    def on_train_start(self, trainer: Trainer, module: GPTModule) -> None:  # type: ignore[override]
        run, step, keep_every = self.run, trainer.global_step, self.run.config.trainer.keep_every
        leave_signals(trainer)
        self._signals.install()  # again, since Lightning has put its own handlers in place
        run.note_code(step)
        self._is_whole, self._saved_at = True, time.monotonic()
        self._saved = step or -1  # a run that was resumed has this step on disk
        # A kill may have come before any of what follows a checkpoint.
        if is_rank_0():
            run.make_last()
        if self._config_changed:
            self._save(trainer, module, step)
        if is_rank_0():
            run.write_config()
            if keep_every and step and step % keep_every == 0:
                run.keep(step)
        self.clock.start()
        self.progress.open(step, self._expected_steps(step))
        if run.config.init_from and not step:
            self._look_before(trainer, module)

    def on_before_optimizer_step(self, trainer: Trainer, module: GPTModule, optimizer) -> None:  # type: ignore[override]
        self._is_whole = False
        self.curves.before_update(module, trainer.global_step + 1)

    # --- after each step ---

    def on_train_batch_end(self, trainer: Trainer, module: GPTModule, outputs, batch, batch_idx: int) -> None:  # type: ignore[override]
        run, step, settings = self.run, trainer.global_step, self.run.config.trainer
        self.clock.end_step(trainer.world_size)
        schedule = run.schedule = run.schedule.after(step, self.clock.share)

        self.curves.add(module, outputs["loss"])
        if logs := schedule.due(step, settings.log_every):
            self.curves.write_point(trainer, module, step, outputs["loss"])
        if schedule.due(step, schedule.validate_every) or self.clock.at_quarter:
            self._validate(trainer, module, step)
        if logs:
            look_for_explosion(run, step)

        late, signal, wish = self._agree(trainer, step)
        self.by_patience = schedule.out_of_patience(run.config.patience, step, run.state.best_step)
        if step < schedule.total_steps:
            self.stopped_by = signal
            self.stopped_at = step if wish or self.by_patience else 0
            if self.stopped_at and self._validated != step:
                self._validate(trainer, module, step)
        trainer.should_stop = bool(self.stopped_by or self.stopped_at or step == schedule.total_steps)

        self.user_curves.note(trainer, module, step)
        if logs or self._validated == step:
            self.user_curves.write()
        self._save_if_due(trainer, module, step, late)
        self.progress.end_step(step, self._expected_steps(step))
        self._is_whole, self.step = True, step

    def _look_before(self, trainer: Trainer, module: GPTModule) -> None:
        """Score and sample trained weights before the first step; this does not count as a validation of the run."""
        with self.clock.paused():
            score = sum_of([score_on_all_ranks(trainer, module, source) for source in self.run.text.sources])
            self.curves.write({"val/loss": score.nats_per_token, "val/bits_per_byte": score.bits_per_byte}, 0)
            if is_rank_0():
                self.samples.write(module, 0)
            self.progress.report(0, self._expected_steps(0), score)

    def _validate(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        """Score the whole validation text, on every rank, and do everything that follows from the score."""
        module.require_finite_weights()
        run, state, steps = self.run, self.run.state, self._expected_steps(step)
        with self.clock.paused():
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                callback.on_validation_start(trainer, module)
                callback.on_validation_epoch_start(trainer, module)
            by_corpus = [score_on_all_ranks(trainer, module, source) for source in run.text.sources]
            score = sum_of(by_corpus)
            if not math.isfinite(score.nats_per_token):
                raise NonFiniteError(f"step {step}: the validation loss is {score.nats_per_token}; {REMEDY}")
            of_longer = state.best_step <= run.schedule.whole_from < step  # the first whose windows are whole
            if score.nats_per_token < state.best_loss or of_longer:
                state.best_loss, state.best_step = score.nats_per_token, step
            self._validated = step
            trainer.callback_metrics["val/loss"] = torch.tensor(score.nats_per_token)
            self.curves.write({"val/loss": score.nats_per_token, "val/bits_per_byte": score.bits_per_byte}, step)
            look_for_memorising(run, step, score)
            if is_rank_0():
                self.samples.write(module, step)
            self.metrics.write(module, step, score, by_corpus, steps)
            self.progress.report(step, steps, score)
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                callback.on_validation_epoch_end(trainer, module)
                callback.on_validation_end(trainer, module)

    def _agree(self, trainer: Trainer, step: int) -> tuple[bool, int, bool]:
        """Whether a checkpoint is late, the signal that came, and whether a callback wishes to stop: on any rank.

        Agreeing takes time, so several ranks do it only where they write curves or validate.
        """
        settings, schedule = self.run.config.trainer, self.run.schedule
        self._wish |= trainer.should_stop
        trainer.should_stop = False  # or else this rank would leave the others
        late = time.monotonic() - self._saved_at >= 60 * settings.checkpoint_minutes
        if trainer.world_size == 1:
            return late, self._signals.received, self._wish
        if not schedule.due(step, settings.log_every) and self._validated != step:
            return False, 0, False
        greatest = torch.tensor([late, self._signals.received, self._wish])
        torch.distributed.all_reduce(greatest, torch.distributed.ReduceOp.MAX)
        late, signal, wish = greatest.tolist()
        return bool(late), signal, bool(wish)

    def _expected_steps(self, step: int) -> int:
        return self.run.schedule.expected_steps(step, self.clock.share)

    # --- checkpoints ---

    def _save_if_due(self, trainer: Trainer, module: GPTModule, step: int, late: bool) -> None:
        """Save best.ckpt after the best validation, and last.ckpt at intervals, when it is late, and at the end."""
        settings, schedule = self.run.config.trainer, self.run.schedule
        keep = settings.keep_every and step % settings.keep_every == 0
        due = schedule.due(step, settings.checkpoint_every) or self.clock.at_quarter
        last, best = late or keep or due or trainer.should_stop, self.run.state.best_step == step
        if not (last or best):
            return
        with self.clock.paused():
            if best:
                self._saving = True
                self.run.save_best(trainer.save_checkpoint, step)
                self._saving = False
            if last:
                self._save(trainer, module, step)
                if keep and is_rank_0():
                    self.run.keep(step)

    def _save(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        module.require_finite_weights()
        like_best = self.run.state.best_step == step and not self._config_changed  # which was saved a moment ago
        self._saving = True
        self.run.save(trainer.save_checkpoint, step, like_best)
        self._saving, self._saved, self._saved_at, self._config_changed = False, step, time.monotonic(), False

    def on_save_checkpoint(self, trainer: Trainer, module: GPTModule, checkpoint: dict) -> None:  # type: ignore[override]
        run, state = self.run, self.run.state
        self.curves.note()
        self.user_curves.settle()
        if module.loss_scale is not None:
            state.loss_scale, state.skipped_steps = module.loss_scale.state_dict(), module.loss_scale.skipped_steps
        checkpoint |= {
            "format": FORMAT,
            "step": module.global_step,
            "config": asdict(run.config),
            "schedule": asdict(run.schedule),
            "state": asdict(state),
            "tokenizer": run.text.tokenizer.to_dict(),
            "corpus": run.text.key,
            "git_commit": run.commit,
            "commits": run.commits,
            "versions": versions(),
            "threads": torch.get_num_threads(),
        }

    def on_exception(self, trainer: Trainer, module: GPTModule, exception: BaseException) -> None:  # type: ignore[override]
        """Save the last whole step, unless saving has failed, numbers are broken, or the stop was to be immediate."""
        at_once = isinstance(exception, NonFiniteError | SystemExit)
        alone = trainer.world_size == 1  # several ranks would wait for each other, and one of them may be gone
        if self._is_whole and trainer.global_step != self._saved and alone and not at_once and not self._saving:
            self._save(trainer, module, trainer.global_step)

    def close(self) -> None:
        """Close curves and progress bar. Lightning has no hook that always runs at the end."""
        self.curves.close()
        self.progress.close()
