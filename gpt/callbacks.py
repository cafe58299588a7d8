"""What happens after a step besides learning: curves, validation, samples, checkpoints, a progress bar, signals."""

import json
import math
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from lightning import Callback, Trainer
from lightning.pytorch.plugins.io import CheckpointIO
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from gpt.batches import validation_batches
from gpt.checkpoint import link, load, save
from gpt.evaluate import Score, evaluate
from gpt.generation import Sampling, TextStream, generate
from gpt.hardware import peak_memory_bytes
from gpt.lit import GPTModule

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
        self.writer: SummaryWriter | None = None
        self.loss = math.nan  # the last that was written
        self.tokens_per_second = 0.0

    def on_train_start(self, trainer: Trainer, module: GPTModule) -> None:  # type: ignore[override]
        self._mark = (trainer.global_step, self._clock.seconds)
        if trainer.is_global_zero:
            # What an interrupted session wrote past its last checkpoint is made anew: TensorBoard then drops the old.
            purge = trainer.global_step + 1 if trainer.global_step else None
            self.writer = SummaryWriter(self._run_dir, purge_step=purge)

    def on_step_end(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        if step % module.config.trainer.log_every != 0 and step != module.plan.total_steps:
            return
        self.loss = module.mean_loss()
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

    def on_train_end(self, trainer: Trainer, module) -> None:
        if self.writer is not None:
            self.writer.close()


class Validation(StepCallback):
    """Scores the validation text, writes samples, attention maps and metrics.json, keeps the best checkpoint."""

    def __init__(self, run_dir: Path, clock: Clock, curves: Curves):
        self._run_dir, self._clock, self._curves = run_dir, clock, curves
        self.best_loss, self.best_step = math.inf, 0
        self.latest: Score | None = None

    def on_step_end(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        if step % module.config.trainer.validate_every != 0 and step != module.plan.total_steps:
            return
        with self._clock.paused():
            score = self.latest = self._evaluate(trainer, module)
            improved = score.nats_per_token < self.best_loss
            if improved:
                self.best_loss, self.best_step = score.nats_per_token, step
            self._curves.write({"val/loss": score.nats_per_token, "val/bits_per_byte": score.bits_per_byte}, step)
            if improved:
                trainer.save_checkpoint(self._run_dir / "checkpoints/best.ckpt")
            if trainer.is_global_zero:
                self._write_samples(module, step)
                self._draw_attention(module, step)
                write_json(self._run_dir / "metrics.json", self.metrics(module, step))

    def _evaluate(self, trainer: Trainer, module: GPTModule) -> Score:
        T = module.config.model.context_length
        batches = validation_batches(module.shards.validation, max(1, 4096 // T), T)
        mine = (batch for i, batch in enumerate(batches) if i % trainer.world_size == trainer.global_rank)
        with trainer.precision_plugin.forward_context():
            score = evaluate(module.model, mine, module.shards.manifest["splits"]["validation"]["bytes"])
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
            "epochs": tokens / len(module.shards.train),
            "train_seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "parameters": module.model.num_parameters(),
            "peak_memory_bytes": peak_memory_bytes(module.device),
        }

    def _write_samples(self, module: GPTModule, step: int) -> None:
        """Continue the fixed prompts, with the same seed each time, so that only the model makes the difference."""
        tokenizer, model = module.shards.tokenizer, module.model
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
        T = min(ATTENTION_TOKENS, module.config.model.context_length, len(module.shards.validation))
        idx = torch.from_numpy(module.shards.validation[:T].astype("int64"))[None].to(module.device)
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
    """Saves last.ckpt at intervals, at the horizon, and when asked to stop; the one before stays as previous.ckpt."""

    def __init__(self, run_dir: Path, clock: Clock, validation: Validation):
        self._folder, self._clock, self._validation = run_dir / "checkpoints", clock, validation
        self._received: int | None = None
        self._handlers: dict[int, object] = {}
        self.stopped_by: int | None = None  # the signal that ended the run early

    def on_train_start(self, trainer: Trainer, module) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame) -> None:
        if self._received is not None:
            raise KeyboardInterrupt  # the second time: at once
        self._received = number
        print("\nstopping after this step (once more to stop at once)", file=sys.stderr, flush=True)

    def on_step_end(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        done = step == module.plan.total_steps
        if self._received is not None and not done:
            self.stopped_by = self._received
            trainer.should_stop = True
        if step % module.config.trainer.checkpoint_every != 0 and not done and not self.stopped_by:
            return
        with self._clock.paused():
            last, previous = self._folder / "last.ckpt", self._folder / "previous.ckpt"
            if trainer.is_global_zero and last.exists():
                link(last, previous)
            if self._validation.best_step == step:
                link(self._folder / "best.ckpt", last)  # written a moment ago, with the same content
            else:
                trainer.save_checkpoint(last)

    def teardown(self, trainer: Trainer, module, stage: str) -> None:
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
                desc="training",
                unit="step",
                bar_format="{percentage:3.0f}% {bar:20} step {n_fmt}/{total_fmt}  {elapsed} < {remaining}  {postfix}",
                mininterval=0.5,
            )

    def on_step_end(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        if not trainer.is_global_zero:
            return
        validated = step % module.config.trainer.validate_every == 0 or step == module.plan.total_steps
        logged = step % module.config.trainer.log_every == 0 or step == module.plan.total_steps
        facts = f"loss {self._curves.loss:.3f}"
        if self._validation.latest:
            facts += f"  val {self._validation.latest.bits_per_byte:.3f} bits/byte"
        facts += f"  {self._curves.tokens_per_second:,.0f} tokens/s"
        if self._bar is not None:
            if logged:
                self._bar.set_postfix_str(facts, refresh=False)
            self._bar.update()
        elif validated:
            print(f"step {step}/{module.plan.total_steps}  {facts}", flush=True)

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


def write_json(path: Path, content: dict) -> None:
    """Replace a JSON file as a whole."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
