"""The curves of a run: in TensorBoard, in metrics.csv, and wherever else its loggers write."""

import contextlib
import csv
import math
import threading
from collections.abc import Mapping
from statistics import fmean
from typing import IO, TYPE_CHECKING, Any

import torch
from lightning import Fabric
from lightning.pytorch.loggers import Logger
from torch import Tensor

from gpt.hardware.device import peak_flops
from gpt.hardware.memory import peak_memory_bytes
from gpt.training import distributed
from gpt.training.loggers import close_loggers, open_loggers
from gpt.training.metrics import curve_points
from gpt.training.module import GPTModule
from gpt.training.optim import OPTIMIZERS
from gpt.training.run_directory import METRICS_FILE, RunDirectory
from gpt.training.schedule import Schedule
from gpt.training.state import RunSpec, TrainState

if TYPE_CHECKING:  # it takes a second to import, and a run may do without
    from torch.utils.tensorboard import SummaryWriter

MAX_SAMPLED_ROWS = 64  # of the largest matrix, at most: enough for a few per cent, and next to nothing to copy


class MetricLogger:
    """Writes loss, learning rates, gradient norm, throughput and update ratios, and what callbacks log.

    metrics.py lists every curve of the project.
    """

    def __init__(self, spec: RunSpec, run: RunDirectory, state: TrainState):
        self._spec, self._run, self._state = spec, run, state
        self._loggers: list[Logger] = []  # wandb and mlflow, on rank 0 while training
        self._table: IO[str] | None = None  # metrics.csv, on rank 0 while training
        self._loss_sum = torch.zeros(())  # of this rank, over the steps since the last point
        self._num_loss_steps = 0
        self._rows_before: Tensor | None = None  # rows of the layers, until the end of a step that gets points
        self._excepthook = threading.excepthook
        self.writer: SummaryWriter | None = None  # TensorBoard's, on rank 0 while training
        self.tokens_per_second = 0.0
        self.has_failed = False  # True if an error ends the training: mlflow shows it

    def open(self, step: int) -> None:
        """Continue after `step`; the files are open from now on, on rank 0, until `close`."""
        state, sums, logger = self._state, self._state.loss_sums, self._spec.config.logger
        own_sum = sums[distributed.rank()] if len(sums) == distributed.world_size() else fmean(sums)
        self._loss_sum, self._num_loss_steps = torch.tensor(own_sum), state.num_loss_steps
        self._last_point = (step, state.seconds)
        if not distributed.is_main_process():
            return
        self._loggers = open_loggers(self._spec.config, self._run.path)
        if "csv" in logger:
            self._table = (self._run.path / METRICS_FILE).open("a", encoding="utf-8", newline="")
            if self._table.tell() == 0:
                self._table.write("step,tag,value\n")
        if "tensorboard" in logger:
            from gpt.training.tensorboard import open_writer

            threading.excepthook = self._on_thread_error
            self.writer = open_writer(self._spec.config, self._run.path, step)

    def _on_thread_error(self, error: threading.ExceptHookArgs) -> None:
        """Ignore write errors of TensorBoard's thread, which the next call of its writer raises."""
        if not (isinstance(error.exc_value, OSError) and "tensorboard" in type(error.thread).__module__):
            self._excepthook(error)

    def begin_step(self, module: GPTModule, step: int, schedule: Schedule) -> None:
        """Copy some of the weights before the update of a step that gets points."""
        config = self._spec.config
        if schedule.is_due(step, config.trainer.log_every) and distributed.is_main_process() and config.logger:
            self._rows_before = _rows(module)

    def add_loss(self, module: GPTModule, loss: Tensor) -> None:
        """Count the loss of a step, on every rank."""
        if module.loss_scale is None or not module.loss_scale.skipped:  # otherwise it may not be finite
            self._loss_sum = self._loss_sum.to(module.device) + loss
            self._num_loss_steps += 1

    def write_point(
        self, fabric: Fabric, module: GPTModule, optimizer: torch.optim.Optimizer, step: int, loss: Tensor
    ) -> None:
        """Write the points of a step, whose loss on this rank is `loss`. Every rank must call this."""
        state, settings = self._state, self._spec.config.trainer
        if fabric.world_size > 1:  # Fabric's all_reduce needs torch.distributed, which some builds lack
            fabric.all_reduce(self._loss_sum, reduce_op="mean")  # in place
        mean_loss = float(self._loss_sum) / self._num_loss_steps if self._num_loss_steps else math.nan
        if math.isfinite(mean_loss):
            state.train_loss = mean_loss
        self._loss_sum = torch.zeros_like(self._loss_sum)  # on its device: moving it would wait
        self._num_loss_steps = 0
        last_step, last_seconds = self._last_point
        if not module.checks_each_step and not math.isfinite(module.grad_norm):
            raise module.non_finite_gradient(last_step, step, loss, "nothing was saved after it")
        self._last_point = (step, state.seconds)
        self.tokens_per_second = (step - last_step) * settings.tokens_per_step / (state.seconds - last_seconds)
        values: dict[str, Any] = {"train_loss": mean_loss, "grad_norm": float(module.grad_norm)}
        rules = OPTIMIZERS[self._spec.config.optim.name]
        for group in optimizer.param_groups:  # lr, and matrix_lr where that is another
            values[rules[group["param_type"]].settings["lr"]] = group["lr"]
        values["tokens_per_second"] = self.tokens_per_second
        if peak := peak_flops(module.device, settings.precision):
            flops = module.model.flops_per_token(module.sequence_length) * self.tokens_per_second
            values["mfu"] = flops / (peak * fabric.world_size)
        if memory := peak_memory_bytes(module.device):
            values["peak_memory_gib"] = memory / 2**30
        if module.loss_scale is not None:
            values["loss_scale"] = float(module.loss_scale.of(module.device))
            values["skipped_steps"] = module.loss_scale.skipped_steps
        values["update_ratio"] = self._update_ratios(module)
        points = curve_points(values)
        self.write({curve: value for curve, value in points.items() if math.isfinite(value)}, step)

    def _update_ratios(self, module: GPTModule) -> dict[str, float]:
        """The norm of a step's change to a layer's matrices over the norm of these, measured on every n-th row.

        There is none where fp16 skips the step.
        """
        before, self._rows_before = self._rows_before, None
        if before is None or (module.loss_scale is not None and module.loss_scale.skipped):
            return {}
        ratios = ((_rows(module) - before).norm(dim=1) / before.norm(dim=1)).tolist()
        return {f"layer_{i}": ratio for i, ratio in enumerate(ratios, start=1)}

    def record(self, values: Mapping[str, Any], step: int) -> None:
        """Add a point to the curves of metrics, whose values are as for `curve_points`."""
        self.write(curve_points(values), step)

    def write(self, scalars: dict[str, float], step: int) -> None:
        """Add a point to each of the named curves; do nothing on ranks above 0."""
        if self.writer is not None:
            for tag, value in scalars.items():
                self.writer.add_scalar(tag, value, step)
        if self._table is not None:
            csv.writer(self._table, lineterminator="\n").writerows([step, *point] for point in scalars.items())
            self._table.flush()
        for logger in self._loggers:
            logger.log_metrics(scalars, step)

    def update_state(self) -> None:
        """Store the running sums and the sizes of the logs in the state of the run. Every rank must call this."""
        state, own_sum = self._state, float(self._loss_sum)
        state.loss_sums, state.num_loss_steps = [own_sum], self._num_loss_steps
        if distributed.world_size() > 1:  # only rank 0 saves
            state.loss_sums *= distributed.world_size()
            torch.distributed.all_gather_object(state.loss_sums, own_sum)
        if distributed.is_main_process():
            if self.writer is not None:
                self.writer.flush()
            state.log_offsets = self._run.sync_logs()

    def close(self) -> None:
        """Write what is still buffered."""
        if self._table is not None:
            with contextlib.suppress(OSError):  # of a full disk, again
                self._table.close()
        if self.writer is not None:
            with contextlib.suppress(FileNotFoundError):  # the run directory was deleted, which has been said
                self.writer.close()
                threading.excepthook = self._excepthook  # not where that failed: its thread may be dying still
        close_loggers(self._loggers, self.has_failed)
        self._loggers = []


@torch.no_grad()
def _rows(module: GPTModule) -> Tensor:
    """A copy of every n-th row of the matrices of each layer, which all have the same shapes: (layers, weights)."""
    matrices = [p for block in module.model.blocks for p in block.parameters() if p.dim() == 2]
    every = -(-max(map(len, matrices)) // MAX_SAMPLED_ROWS)  # the same of each matrix, so that each has its share
    return torch.cat([p[::every].flatten() for p in matrices]).view(len(module.model.blocks), -1)
