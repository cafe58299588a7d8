"""What happens after a step besides learning: curves, validation, samples, checkpoints, a progress bar, signals."""

import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from lightning import Callback, Trainer
from lightning.pytorch.plugins.io import CheckpointIO
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from gpt.errors import NonFiniteError, UserError, write_line
from gpt.exchange.checkpoint import load, save
from gpt.files import link, sync, write_text
from gpt.hardware import peak_memory_bytes
from gpt.sampling.generation import Sampling, TextStream, generate
from gpt.sampling.scoring import Score, evaluate, sum_of
from gpt.text.batches import validation_batches, windows_given
from gpt.text.shards import Shards
from gpt.training.module import GPTModule

SAMPLE_TOKENS = 120
ATTENTION_TOKENS = 64


class StepCallback(Callback):
    """A callback that acts once an optimizer step is done, however many micro-batches it took."""

    def on_train_batch_end(self, trainer: Trainer, module: GPTModule, outputs, batch, batch_idx: int) -> None:  # type: ignore[override]
        if (batch_idx + 1) % module.plan.accumulation == 0:
            self.on_step_end(trainer, module, trainer.global_step)

    def on_step_end(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        """Called after the update that makes `step` updates in all."""


class Clock(Callback):
    """The seconds spent on training steps: all the time in the fit loop but for what is done inside `paused`."""

    def __init__(self) -> None:
        self._before = 0.0  # from earlier sessions of the run, and from stretches before a pause
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        return self._before + (time.perf_counter() - self._since if self._since is not None else 0.0)

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._before, self._since = self.seconds, None
        try:
            yield
        finally:
            self._since = time.perf_counter()

    def on_train_start(self, trainer: Trainer, module) -> None:
        self._since = time.perf_counter()

    def on_train_end(self, trainer: Trainer, module) -> None:
        self._before, self._since = self.seconds, None

    def state_dict(self) -> dict:
        return {"seconds": self.seconds}

    def load_state_dict(self, state: dict) -> None:
        self._before = state["seconds"]


class Curves(StepCallback):
    """TensorBoard: loss, rates, gradient norm and throughput as scalars; others add theirs through `writer`."""

    def __init__(self, run_dir: Path, clock: Clock, peak: float | None):
        self._run_dir, self._clock, self._peak = run_dir, clock, peak
        self._losses, self._num_losses = torch.zeros(()), 0  # summed over the steps since the last that was written
        self.writer: SummaryWriter | None = None
        self.loss = math.nan  # the last that was written
        self.tokens_per_second = 0.0

    def on_train_start(self, trainer: Trainer, module: GPTModule) -> None:  # type: ignore[override]
        self._mark = (trainer.global_step, self._clock.seconds)
        if trainer.is_global_zero:
            # A TensorBoard that watches drops what an interrupted session wrote past the checkpoint.
            self.writer = SummaryWriter(self._run_dir, purge_step=trainer.global_step + 1)

    def on_step_end(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        self._losses = self._losses.to(module.device) + module.step_loss
        self._num_losses += 1
        if not module.plan.due(step, module.config.trainer.log_every):
            return
        self.loss = float(trainer.strategy.reduce(self._losses, reduce_op="mean")) / self._num_losses
        self._losses, self._num_losses = torch.zeros(()), 0
        steps, seconds = step - self._mark[0], self._clock.seconds - self._mark[1]
        self._mark = (step, self._clock.seconds)
        self.tokens_per_second = steps * module.config.trainer.tokens_per_step / seconds
        scalars = {
            "train/loss": self.loss,
            "train/lr": trainer.optimizers[0].param_groups[0]["lr"],
            "train/grad_norm": float(module.grad_norm),
            "perf/tokens_per_second": self.tokens_per_second,
        }
        if self._peak:
            flops = module.model.flops_per_token(module.config.model.context_length) * self.tokens_per_second
            scalars["perf/mfu"] = flops / (self._peak * trainer.world_size)
        self.write(scalars, step)

    def write(self, scalars: dict[str, float], step: int) -> None:
        if self.writer is not None:
            for tag, value in scalars.items():
                self.writer.add_scalar(tag, value, step)

    def close(self) -> None:
        """Write what is still held back. Lightning has no hook that is called at every end."""
        if self.writer is not None:
            self.writer.close()

    def state_dict(self) -> dict:
        return {"losses": float(self._losses), "num_losses": self._num_losses}

    def load_state_dict(self, state: dict) -> None:
        self._losses, self._num_losses = torch.tensor(state["losses"]), state["num_losses"]


class Journal(Callback):
    """The files that grow along a run, samples.md and TensorBoard's, as a part of its state.

    A checkpoint knows how long they were. Whatever an interrupted session added after it is cut off on resuming, since
    the steps after it are made anew: the curves go on without a gap and without doubled points.
    """

    def __init__(self, run_dir: Path, curves: Curves):
        self._run_dir, self._curves = run_dir, curves
        self._samples = run_dir / "samples.md"
        self._sizes: dict = {
            "samples": 0,
            "events": [],
        }  # of the event files in the order in which TensorBoard reads them

    def _events(self) -> list[Path]:
        return sorted(self._run_dir.glob("events.out.tfevents.*"))

    def on_fit_start(self, trainer: Trainer, module) -> None:
        if not trainer.is_global_zero:
            return
        if self._samples.exists():
            os.truncate(self._samples, min(self._sizes["samples"], self._samples.stat().st_size))
        known = len(self._sizes["events"])
        for file in self._events()[known:]:
            file.unlink()
        for file, size in zip(self._events(), self._sizes["events"], strict=False):
            os.truncate(file, min(size, file.stat().st_size))
        # TensorBoard reads event files in the order of the seconds in their names: the next has to come last, even
        # where the clock has been put back since. Oldest first, and in their order, so that a kill does no harm.
        events, now = self._events(), int(time.time())
        for i, file in enumerate(events):
            seconds, rest = file.name.split(".", 4)[3:]
            latest = now - (len(events) - i)
            if int(seconds) > latest:
                file.rename(file.with_name(f"events.out.tfevents.{latest:010d}.{rest}"))

    def state_dict(self) -> dict:
        if self._curves.writer is not None:
            self._curves.writer.flush()
            grown = [file for file in [self._samples, *self._events()] if file.exists()]
            for file in grown:
                sync(file)
            sizes = {file: file.stat().st_size for file in grown}
            self._sizes = {"samples": sizes.pop(self._samples, 0), "events": list(sizes.values())}
        return self._sizes

    def load_state_dict(self, state: dict) -> None:
        self._sizes = state


class Validation(StepCallback):
    """Scores the validation text, writes samples, attention maps and metrics.json, keeps the best checkpoint."""

    def __init__(self, run_dir: Path, clock: Clock, curves: Curves):
        self._run_dir, self._clock, self._curves = run_dir, clock, curves
        self.best_loss, self.best_step = math.inf, -1
        self.latest: Score | None = None
        self._of_corpora: list[Score] = []

    def on_step_end(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        if not module.plan.due(step, module.config.trainer.validate_every):
            return
        module.require_finite_weights()
        with self._clock.paused():
            self._of_corpora = [self._evaluate(trainer, module, source) for source in module.corpora.sources]
            score = self.latest = sum_of(self._of_corpora)
            improved = score.nats_per_token < self.best_loss
            if improved:
                self.best_loss, self.best_step = score.nats_per_token, step
            self._curves.write({"val/loss": score.nats_per_token, "val/bits_per_byte": score.bits_per_byte}, step)
            for name, figures in self.mixture(module, step).items():
                self._curves.write({f"{figure}/{name}": value for figure, value in figures.items()}, step)
            if trainer.is_global_zero:
                with torch.compiler.set_stance("force_eager"):  # lengths that vary are not worth compiling for
                    self._write_samples(module, step)
                    self._draw_attention(module, step)
                write_text(self._run_dir / "metrics.json", json.dumps(self.metrics(module, step), indent=2) + "\n")
            if improved:
                trainer.save_checkpoint(self._run_dir / "checkpoints/best.ckpt")

    def _evaluate(self, trainer: Trainer, module: GPTModule, source: Shards) -> Score:
        T = module.config.model.context_length
        batches = validation_batches(source.validation, max(1, 4096 // T), T)
        mine = (batch for i, batch in enumerate(batches) if i % trainer.world_size == trainer.global_rank)
        score = evaluate(module.model, mine, source.manifest["splits"]["validation"]["bytes"])
        if trainer.world_size == 1:
            return score
        totals = torch.tensor([score.nats, score.tokens], dtype=torch.float64, device=module.device)
        totals = trainer.strategy.reduce(totals, reduce_op="sum")
        assert isinstance(totals, Tensor)
        return Score(float(totals[0]), int(totals[1]), score.bytes)

    def metrics(self, module: GPTModule, step: int) -> dict:
        """What metrics.json holds: see the README for each key."""
        assert self.latest is not None
        tokens = step * module.config.trainer.tokens_per_step
        seconds = self._clock.seconds
        return {
            "val_loss": self.latest.nats_per_token,
            "val_nats_per_byte": self.latest.nats_per_byte,
            "val_bits_per_byte": self.latest.bits_per_byte,
            "best_step": self.best_step,
            "steps": step,
            "tokens": tokens,
            "epochs": tokens / module.corpora.train_tokens,
            "train_seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "parameters": module.model.num_parameters(),
            "peak_memory_bytes": peak_memory_bytes(module.device),
        } | ({"mix": mixture} if (mixture := self.mixture(module, step)) else {})

    def mixture(self, module: GPTModule, step: int) -> dict[str, dict[str, float]]:
        """Of each corpus of a mixture, how often its text was seen and how well it is predicted; empty without one."""
        corpora = module.corpora
        if len(corpora.sources) == 1:
            return {}
        windows = windows_given(step * module.plan.windows_per_step, corpora.shares, module.config.seed)
        T = module.config.model.context_length
        return {
            name: {"epochs": given * T / len(source.train), "val_bits_per_byte": score.bits_per_byte}
            for name, given, source, score in zip(
                corpora.names, windows, corpora.sources, self._of_corpora, strict=True
            )
        }

    def _write_samples(self, module: GPTModule, step: int) -> None:
        """Continue the fixed prompts, with the same seed each time, so that only the model makes the difference."""
        tokenizer, model = module.corpora.tokenizer, module.model
        generator = torch.Generator(module.device).manual_seed(module.config.seed)
        entries = []
        for prompt in module.config.data.prompts:
            ids = (tokenizer.encode(prompt) or [tokenizer.end_of_text])[-module.config.model.context_length :]
            out = TextStream(tokenizer)
            idx = torch.tensor([ids], device=module.device)
            for token in generate(model, idx, SAMPLE_TOKENS, Sampling(), generator):
                out.feed(int(token))
                if out.finish_reason:
                    break
            out.finish()
            entries.append(f"**{prompt}**{out.text}" if prompt else out.text)
        model.train()
        text = "\n\n---\n\n".join(entries)
        if self._curves.writer is not None:
            self._curves.writer.add_text("samples", text, step)
        with (self._run_dir / "samples.md").open("a", encoding="utf-8") as stream:
            stream.write(f"## Step {step}\n\n{text}\n\n")

    def _draw_attention(self, module: GPTModule, step: int) -> None:
        """A picture for each layer, its heads side by side: rows attend to columns, the darker the more."""
        text = module.corpora.sources[0].validation
        T = min(ATTENTION_TOKENS, module.config.model.context_length, len(text))
        idx = torch.from_numpy(text[:T].astype("int64"))[None].to(module.device)
        model = module.model.eval()
        maps = model.attention_maps(idx)[0].float().cpu()  # (L, H, T, T)
        model.train()
        for layer, heads in enumerate(maps):
            framed = torch.nn.functional.pad(heads.sqrt(), (1, 1, 1, 1), value=0.3)  # (H, T + 2, T + 2)
            picture = 1.0 - torch.cat(list(framed), dim=1)
            picture = picture.repeat_interleave(3, 0).repeat_interleave(3, 1)
            if self._curves.writer is not None:
                self._curves.writer.add_image(f"attention/layer_{layer}", picture, step, dataformats="HW")

    def state_dict(self) -> dict:
        return {"best_loss": self.best_loss, "best_step": self.best_step}

    def load_state_dict(self, state: dict) -> None:
        self.best_loss, self.best_step = state["best_loss"], state["best_step"]


class LastCheckpoint(StepCallback):
    """Saves last.ckpt at intervals, at the horizon, when asked to stop, and when something breaks between two updates.

    The one before it stays as previous.ckpt. A first SIGINT or SIGTERM stops after the step, a second one at once.
    """

    def __init__(self, run_dir: Path, clock: Clock, validation: Validation):
        self._folder, self._clock, self._validation = run_dir / "checkpoints", clock, validation
        self._received = 0
        self._handlers: dict[int, object] = {}
        self._saved_step, self._saved_at = -1, 0.0
        self.stopped_by = 0  # the signal that ended the run early

    def setup(self, trainer: Trainer, module, stage: str) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._on_signal)

    def on_train_start(self, trainer: Trainer, module) -> None:
        self._saved_at = time.monotonic()
        self._saved_step = trainer.global_step or -1  # what was resumed from is on disk
        for number in self._handlers:  # once more: Lightning has put its own in their place
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame) -> None:
        if self._received:
            sys.exit(128 + number)
        self._received = number
        with suppress(OSError):  # not print, which must not be entered twice
            os.write(2, b"\nstopping after this step (once more to stop at once)\n")

    def on_step_end(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        settings = module.config.trainer
        late = time.monotonic() - self._saved_at >= 60 * settings.checkpoint_minutes
        received = self._received
        if trainer.world_size > 1:  # all processes have to do the same, and asking takes time
            asks = module.plan.due(step, settings.log_every)
            late, received = trainer.strategy.broadcast((late, received)) if asks else (False, 0)
        if received and step < module.plan.total_steps:
            self.stopped_by = received
            trainer.should_stop = True
        if late or self.stopped_by or module.plan.due(step, settings.checkpoint_every):
            with self._clock.paused():
                self._save(trainer, module, step)

    def on_exception(self, trainer: Trainer, module: GPTModule, exception: BaseException) -> None:  # type: ignore[override]
        ours = isinstance(exception, UserError | NonFiniteError | SystemExit)
        alone = trainer.world_size == 1  # several processes would wait for each other, and one of them may be gone
        if module.between_updates and alone and not ours and self._saved_step != trainer.global_step:
            self._save(trainer, module, trainer.global_step)

    def _save(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        last, previous, best = (self._folder / f"{name}.ckpt" for name in ("last", "previous", "best"))
        module.require_finite_weights()
        if trainer.is_global_zero and last.exists():
            link(last, previous)
        if self._validation.best_step != step:
            trainer.save_checkpoint(last)
        elif trainer.is_global_zero:
            link(best, last)  # written a moment ago, with the same content
        self._saved_step, self._saved_at = step, time.monotonic()

    def close(self) -> None:
        """Leave signals as they were before."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._handlers.clear()


class Progress(StepCallback):
    """A bar on a terminal; elsewhere a line for each validation."""

    def __init__(self, validation: Validation, curves: Curves):
        self._validation, self._curves = validation, curves
        self._bar: tqdm | None = None

    def on_train_start(self, trainer: Trainer, module: GPTModule) -> None:  # type: ignore[override]
        if trainer.is_global_zero and sys.stderr.isatty():
            self._bar = tqdm(
                total=module.plan.total_steps,
                initial=trainer.global_step,
                bar_format="{percentage:3.0f}% {bar:20} step {n_fmt}/{total_fmt}  {elapsed} < {remaining}  {desc}",
                mininterval=0.5,
            )

    def on_step_end(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        if not trainer.is_global_zero:
            return
        validated = module.plan.due(step, module.config.trainer.validate_every)
        logged = module.plan.due(step, module.config.trainer.log_every)
        known = not math.isnan(self._curves.loss)  # from the first log on
        facts = f"loss {self._curves.loss:.3f}" if known else ""
        if self._validation.latest:
            facts += f"  val {self._validation.latest.bits_per_byte:.3f} bits/byte"
        if known:
            facts += f"  {self._curves.tokens_per_second:,.0f} tokens/s"
        if self._bar is not None:
            if logged:
                self._bar.set_description_str(facts, refresh=False)
            self._bar.update()
        elif validated:
            write_line(f"step {step}/{module.plan.total_steps}  {facts}", sys.stdout)

    def teardown(self, trainer: Trainer, module, stage: str) -> None:
        if self._bar is not None:
            self._bar.close()


class CheckpointFiles(CheckpointIO):
    """Has Lightning write and read checkpoints through gpt/checkpoint.py: atomically, and verified."""

    def save_checkpoint(self, checkpoint: dict, path, storage_options=None) -> None:
        save(checkpoint, Path(path))

    def load_checkpoint(self, path, map_location=None, weights_only=None) -> dict:
        return load(Path(path))

    def remove_checkpoint(self, path) -> None:
        Path(path).unlink(missing_ok=True)
