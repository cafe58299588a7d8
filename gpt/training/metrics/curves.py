"""The curves of a run: in TensorBoard, in metrics.csv, and wherever else its loggers write."""

import contextlib
import csv
import math
import threading
from pathlib import Path
from statistics import fmean
from typing import IO, TYPE_CHECKING

import torch
from lightning import Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor

from gpt.hardware.device import peak_flops
from gpt.hardware.memory import peak_memory_bytes
from gpt.sampling.scoring import Score
from gpt.training.callbacks.base import Clock, StepCallback
from gpt.training.config.schema import Config
from gpt.training.distributed.launch import ranks
from gpt.training.module import GPTModule
from gpt.training.optim import OPTIMIZERS
from gpt.training.run.run import EVENTS, SUFFIX, TABLE

if TYPE_CHECKING:  # it takes a second to import, and a run may do without
    from torch.utils.tensorboard import SummaryWriter

ROWS = 64  # of the largest matrix, at most: enough for a few per cent, and next to nothing to copy


class Curves(StepCallback):
    """Writes loss, rates, gradient norm, throughput and how far a step moves each layer; other callbacks add theirs.

    TensorBoard shows the first two groups of tags open, so all others have names that sort behind `train` and `val`.
    """

    def __init__(self, run_dir: Path, clock: Clock):
        self._run_dir, self._clock = run_dir, clock
        self.loggers: list[Logger] = []  # beside TensorBoard and metrics.csv, on rank 0
        self._table: IO[str] | None = None  # metrics.csv, on rank 0 while training
        self.writing = False  # whether this is rank 0 and it trains
        self._losses, self._num_losses = torch.zeros(()), 0  # this rank's sum over the steps since the last point
        self._before: Tensor | None = None  # rows of the layers, until the end of a step that gets points
        self._excepthook = threading.excepthook
        self.writer: SummaryWriter | None = None  # TensorBoard's, on rank 0 while training
        self.loss = math.nan  # the last point of train/loss
        self.tokens_per_second = 0.0

    def on_train_start(self, trainer: Trainer, module: GPTModule) -> None:  # type: ignore[override]
        self._mark = (trainer.global_step, self._clock.seconds)
        self.writing = trainer.is_global_zero
        if self.writing:
            with self._clock.paused():
                self._open(module.config, trainer.global_step)

    def _open(self, config: Config, step: int) -> None:
        if "csv" in config.logger:
            self._table = (self._run_dir / TABLE).open("a", encoding="utf-8", newline="")
            if self._table.tell() == 0:
                self._table.write("step,tag,value\n")
        if "tensorboard" not in config.logger:
            return
        from torch.utils.tensorboard import SummaryWriter

        from gpt.training.metrics.tensorboard import named_after, opening

        threading.excepthook = self._on_thread_error
        place = self._run_dir if config.run_dir else self._run_dir.parent
        self._lines = place / ".references"  # hidden, so that runs/* are runs
        # Tells a TensorBoard that is running to drop what an interrupted session wrote past the checkpoint.
        with named_after(max(self._run_dir.glob(EVENTS), default=None)):
            self.writer = SummaryWriter(self._run_dir, purge_step=step + 1, filename_suffix=SUFFIX)
        for summary in opening(config) if step == 0 else ():
            self.writer._get_file_writer().add_summary(summary, 0)

    def _on_thread_error(self, error: threading.ExceptHookArgs) -> None:
        """Leave it to the next call of TensorBoard's writer to raise what its thread could not write."""
        if not isinstance(error.exc_value, OSError):
            self._excepthook(error)

    def on_before_optimizer_step(self, trainer: Trainer, module: GPTModule, optimizer) -> None:  # type: ignore[override]
        due = module.schedule.due(trainer.global_step + 1, module.config.trainer.log_every)
        if due and self.writing and module.config.logger:
            self._before = _rows(module)

    def on_step_end(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        scaling = module.loss_scaling
        if scaling is None or not scaling.skipped:  # otherwise it may not be finite
            self._losses = self._losses.to(module.device) + module.step_loss
            self._num_losses += 1
        if not module.schedule.due(step, module.config.trainer.log_every):
            return
        total = float(trainer.strategy.reduce(self._losses, reduce_op="mean"))
        loss = total / self._num_losses if self._num_losses else math.nan
        self.loss = loss if math.isfinite(loss) else self.loss
        self._losses, self._num_losses = torch.zeros_like(self._losses), 0  # on its device: moving it would wait
        steps, seconds = step - self._mark[0], self._clock.seconds - self._mark[1]
        if not module.checks_each_step:
            module.require_finite_gradient(self._mark[0], step, "nothing was saved after it")
        self._mark = (step, self._clock.seconds)
        self.tokens_per_second = steps * module.config.trainer.tokens_per_step / seconds
        scalars = {"train/loss": loss, "train/grad_norm": float(module.grad_norm)}
        rules = OPTIMIZERS[module.config.optim.name]
        for group in trainer.optimizers[0].param_groups:  # train/lr, and train/matrix_lr where that is another
            scalars[f"train/{rules[group['role']].settings['lr']}"] = group["lr"]
        scalars["work/tokens_per_second"] = self.tokens_per_second
        if peak := peak_flops(module.device, module.config.trainer.precision):  # work/mfu is the share of it in use
            flops = module.model.flops_per_token(module.config.model.context_length) * self.tokens_per_second
            scalars["work/mfu"] = flops / (peak * trainer.world_size)
        if memory := peak_memory_bytes(module.device):
            scalars["work/peak_memory_gib"] = memory / 2**30
        if scaling is not None:
            scale = float(scaling.scale(module.device))
            scalars |= {"train/loss_scale": scale, "train/skipped_steps": scaling.skipped_steps}
        scalars |= self._update_ratios(module)
        self.write({tag: value for tag, value in scalars.items() if math.isfinite(value)}, step)

    def _update_ratios(self, module: GPTModule) -> dict[str, float]:
        """The norm of a step's change to a layer's matrices over the norm of these, measured on every n-th row.

        There is none where weights are split among devices, or where fp16 skips the step.
        """
        before, self._before = self._before, None
        if before is None or (module.loss_scaling is not None and module.loss_scaling.skipped):
            return {}
        ratios = ((_rows(module) - before).norm(dim=1) / before.norm(dim=1)).tolist()
        return {f"weights/update_ratio/layer_{i}": ratio for i, ratio in enumerate(ratios, start=1)}

    def on_validated(self, trainer: Trainer, module: GPTModule, step: int, score: Score) -> None:
        self.write({"val/loss": score.nats_per_token, "val/bits_per_byte": score.bits_per_byte}, step)

    def draw_references(self, bits: dict[str, float], steps: int) -> None:
        """Show references in TensorBoard as named lines beside val/bits_per_byte, which the runs in runs/ share."""
        if self.writer is not None:
            from gpt.training.metrics.tensorboard import draw_line

            with contextlib.suppress(OSError):  # as where runs/ is somebody else's: a run does without these lines
                for name, value in bits.items():
                    draw_line(self._lines / f"{name} {value:.4f}", "val/bits_per_byte", value, steps)

    def write(self, scalars: dict[str, float], step: int, everywhere: bool = True) -> None:
        """Add a point to each of the named curves, `everywhere` or in our files alone; do nothing on ranks above 0."""
        if self.writer is not None:
            for tag, value in scalars.items():
                if not tag.startswith("val_references/"):  # which are drawn already
                    self.writer.add_scalar(tag, value, step)
        if self._table is not None:
            csv.writer(self._table, lineterminator="\n").writerows([step, *point] for point in scalars.items())
            self._table.flush()
        for logger in self.loggers if everywhere else ():
            logger.log_metrics(scalars, step)

    def close(self) -> None:
        """Write what is still buffered. Lightning has no hook that always runs at the end."""
        threading.excepthook = self._excepthook
        if self._table is not None:
            with contextlib.suppress(OSError):  # of a full disk, again
                self._table.close()
        if self.writer is not None:
            with contextlib.suppress(FileNotFoundError):  # the run directory was deleted, which has been said
                self.writer.close()

    def state_dict(self) -> dict:
        # Called on every rank, but only rank 0 saves: it needs the sums of all.
        sums = [mine := float(self._losses)]
        if ranks().world_size > 1:
            sums *= ranks().world_size
            torch.distributed.all_gather_object(sums, mine)
        last = {} if math.isnan(self.loss) else {"loss": self.loss}  # a checkpoint with a NaN is refused
        return {"losses": sums, "num_losses": self._num_losses} | last

    def load_state_dict(self, state: dict) -> None:
        sums, here = state["losses"], ranks()
        own = sums[here.rank] if len(sums) == here.world_size else fmean(sums)
        self._losses, self._num_losses = torch.tensor(own), state["num_losses"]
        self.loss = state.get("loss", math.nan)


@torch.no_grad()
def _rows(module: GPTModule) -> Tensor:
    """A copy of every n-th row of the matrices of each layer, which all have the same shapes: (layers, weights)."""
    matrices = [p for block in module.model.blocks for p in block.parameters() if p.dim() == 2]
    every = -(-max(map(len, matrices)) // ROWS)  # the same of each matrix, so that each has its share
    return torch.cat([p[::every].flatten() for p in matrices]).view(len(module.model.blocks), -1)
