"""The curves of a run: in TensorBoard, in metrics.csv, and wherever else its loggers write."""

import contextlib
import csv
import math
import threading
from collections.abc import Sequence
from statistics import fmean
from typing import IO, TYPE_CHECKING

import torch
from lightning import Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor

from gpt.hardware.device import peak_flops
from gpt.hardware.memory import peak_memory_bytes
from gpt.training.distributed.launch import is_rank_0, ranks
from gpt.training.module import GPTModule
from gpt.training.optim import OPTIMIZERS
from gpt.training.run.run import EVENTS, REFERENCES, SUFFIX, TABLE, Run, text_name

if TYPE_CHECKING:  # it takes a second to import, and a run may do without
    from torch.utils.tensorboard import SummaryWriter

ROWS = 64  # of the largest matrix, at most: enough for a few per cent, and next to nothing to copy


class Curves:
    """Writes loss, rates, gradient norm, throughput and how far a step moves each layer, and what others add.

    TensorBoard shows the first two groups of tags open, so all others have names that sort behind `train` and `val`.
    """

    def __init__(self, run: Run, loggers: Sequence[Logger] = ()):
        self._run = run
        self._loggers = loggers  # beside TensorBoard and metrics.csv, on rank 0
        self._table: IO[str] | None = None  # metrics.csv, on rank 0 while training
        self._losses, self._num_losses = torch.zeros(()), 0  # this rank's sum over the steps since the last point
        self._before: Tensor | None = None  # rows of the layers, until the end of a step that gets points
        self._excepthook = threading.excepthook
        self.writer: SummaryWriter | None = None  # TensorBoard's, on rank 0 while training
        self.tokens_per_second = 0.0

    def open(self, step: int) -> None:
        """Go on after `step`; the files are open from now on, on rank 0, until `close`."""
        run, sums, here = self._run, self._run.state.losses, ranks()
        own = sums[here.rank] if len(sums) == here.world_size else fmean(sums)
        self._losses, self._num_losses = torch.tensor(own), run.state.num_losses
        self._mark = (step, run.state.seconds)
        if not is_rank_0():
            return
        if "csv" in run.config.logger:
            self._table = (run.directory / TABLE).open("a", encoding="utf-8", newline="")
            if self._table.tell() == 0:
                self._table.write("step,tag,value\n")
        if "tensorboard" not in run.config.logger:
            return
        from torch.utils.tensorboard import SummaryWriter

        from gpt.training.metrics.tensorboard import named_after, opening

        threading.excepthook = self._on_thread_error
        # Tells a TensorBoard that is running to drop what an interrupted process wrote past the checkpoint.
        with named_after(max(run.directory.glob(EVENTS), default=None)):
            self.writer = SummaryWriter(run.directory, purge_step=step + 1, filename_suffix=SUFFIX)
        for summary in opening(run.config) if step == 0 else ():
            self.writer._get_file_writer().add_summary(summary, 0)

    def _on_thread_error(self, error: threading.ExceptHookArgs) -> None:
        """Ignore write errors of TensorBoard's thread, which the next call of its writer raises."""
        if not (isinstance(error.exc_value, OSError) and "tensorboard" in type(error.thread).__module__):
            self._excepthook(error)

    def before_update(self, module: GPTModule, step: int) -> None:
        """Note where the weights are before the update of a step that gets points."""
        if self._run.schedule.due(step, self._run.config.trainer.log_every) and is_rank_0() and self._run.config.logger:
            self._before = _rows(module)

    def add(self, module: GPTModule, loss: Tensor) -> None:
        """Count the loss of a step, on every rank."""
        if module.loss_scale is None or not module.loss_scale.skipped:  # otherwise it may not be finite
            self._losses = self._losses.to(module.device) + loss
            self._num_losses += 1

    def write_point(self, trainer: Trainer, module: GPTModule, step: int, last: Tensor) -> None:
        """Add the points of a step, whose loss on this rank is `last`; every rank must call this."""
        total = float(trainer.strategy.reduce(self._losses, reduce_op="mean"))
        loss = total / self._num_losses if self._num_losses else math.nan
        run, settings = self._run, self._run.config.trainer
        run.state.loss = loss if math.isfinite(loss) else run.state.loss
        self._losses, self._num_losses = torch.zeros_like(self._losses), 0  # on its device: moving it would wait
        steps, seconds = step - self._mark[0], run.state.seconds - self._mark[1]
        if not module.checks_each_step and not math.isfinite(module.grad_norm):
            raise module.broken_gradient(self._mark[0], step, last, "nothing was saved after it")
        self._mark = (step, run.state.seconds)
        self.tokens_per_second = steps * settings.tokens_per_step / seconds
        scalars = {"train/loss": loss, "weights/grad_norm": float(module.grad_norm)}
        rules = OPTIMIZERS[run.config.optim.name]
        for group in trainer.optimizers[0].param_groups:  # train/lr, and train/matrix_lr where that is another
            scalars[f"train/{rules[group['role']].settings['lr']}"] = group["lr"]
        scalars["work/tokens_per_second"] = self.tokens_per_second
        if peak := peak_flops(module.device, settings.precision):  # work/mfu is the share of it in use
            flops = module.model.flops_per_token(module.window) * self.tokens_per_second
            scalars["work/mfu"] = flops / (peak * trainer.world_size)
        if memory := peak_memory_bytes(module.device):
            scalars["work/peak_memory_gib"] = memory / 2**30
        if module.loss_scale is not None:
            scalars["train/loss_scale"] = float(module.loss_scale.of(module.device))
            scalars["train/skipped_steps"] = module.loss_scale.skipped_steps
        scalars |= self._update_ratios(module)
        self.write({tag: value for tag, value in scalars.items() if math.isfinite(value)}, step)

    def _update_ratios(self, module: GPTModule) -> dict[str, float]:
        """The norm of a step's change to a layer's matrices over the norm of these, measured on every n-th row.

        There is none where fp16 skips the step.
        """
        before, self._before = self._before, None
        if before is None or (module.loss_scale is not None and module.loss_scale.skipped):
            return {}
        ratios = ((_rows(module) - before).norm(dim=1) / before.norm(dim=1)).tolist()
        return {f"weights/update_ratio/layer_{i}": ratio for i, ratio in enumerate(ratios, start=1)}

    def draw_references(self, bits: dict[str, float], steps: int) -> None:
        """Show the best two references of a text as lines beside val/bits_per_byte, which the runs in runs/ share."""
        if self.writer is not None:
            from gpt.training.metrics.tensorboard import draw_line

            place = self._run.directory if self._run.config.run_dir else self._run.directory.parent
            text = text_name(self._run.config.data)
            with contextlib.suppress(OSError):  # as where runs/ is somebody else's: a run does without these lines
                for name, value in sorted(bits.items(), key=lambda item: item[1])[:2]:
                    draw_line(place / REFERENCES / f"{text} {name} {value:.4f}", "val/bits_per_byte", value, steps)

    def write(self, scalars: dict[str, float], step: int, everywhere: bool = True) -> None:
        """Add a point to each of the named curves, `everywhere` or in our files alone; do nothing on ranks above 0."""
        if self.writer is not None:
            for tag, value in scalars.items():
                if not tag.startswith("val_references/"):  # which are drawn already
                    self.writer.add_scalar(tag, value, step)
        if self._table is not None:
            csv.writer(self._table, lineterminator="\n").writerows([step, *point] for point in scalars.items())
            self._table.flush()
        for logger in self._loggers if everywhere else ():
            logger.log_metrics(scalars, step)

    def note(self) -> None:
        """Store the running sums and the sizes of files in the state of the run; every rank must call this."""
        state = self._run.state
        state.losses, state.num_losses = [mine := float(self._losses)], self._num_losses
        if ranks().world_size > 1:  # only rank 0 saves
            state.losses *= ranks().world_size
            torch.distributed.all_gather_object(state.losses, mine)
        if is_rank_0():
            if self.writer is not None:
                self.writer.flush()
            state.sizes = self._run.sizes()

    def close(self) -> None:
        """Write what is still buffered."""
        if self._table is not None:
            with contextlib.suppress(OSError):  # of a full disk, again
                self._table.close()
        if self.writer is not None:
            with contextlib.suppress(FileNotFoundError):  # the run directory was deleted, which has been said
                self.writer.close()
                threading.excepthook = self._excepthook  # not where that failed: its thread may be dying still


@torch.no_grad()
def _rows(module: GPTModule) -> Tensor:
    """A copy of every n-th row of the matrices of each layer, which all have the same shapes: (layers, weights)."""
    matrices = [p for block in module.model.blocks for p in block.parameters() if p.dim() == 2]
    every = -(-max(map(len, matrices)) // ROWS)  # the same of each matrix, so that each has its share
    return torch.cat([p[::every].flatten() for p in matrices]).view(len(module.model.blocks), -1)
