"""The curves of a run: in TensorBoard, in metrics.csv, and in wandb and mlflow."""

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
from gpt.training.loggers import close_loggers, open_event_file, open_loggers
from gpt.training.metrics import curve_points
from gpt.training.module import GPTModule
from gpt.training.optim import OPTIMIZERS
from gpt.training.run_directory import METRICS_FILE, RunDirectory
from gpt.training.schedule import Schedule
from gpt.training.state import RunSpec, TrainState

if TYPE_CHECKING:  # importing it takes a second, and a run may not use it
    from torch.utils.tensorboard import SummaryWriter

MAX_SAMPLED_ROWS = 64  # of each matrix; enough to estimate an update ratio to a few per cent


class MetricLogger:
    """Writes the metrics of training steps and validations, and what callbacks log. metrics.py lists all curves.

    On ranks above 0, nothing is written.
    """

    def __init__(self, spec: RunSpec, run: RunDirectory, state: TrainState):
        self._spec = spec
        self._run = run
        self._state = state
        self._loggers: list[Logger] = []  # wandb and mlflow
        self._table: IO[str] | None = None  # metrics.csv
        self.writer: SummaryWriter | None = None  # of TensorBoard
        self._loss_sum = torch.zeros(())  # on this rank, over the steps since the last point
        self._num_loss_steps = 0
        self._rows_before_update: Tensor | None = None  # in a step that gets a point
        self._excepthook = threading.excepthook
        self.tokens_per_second = 0.0
        self.has_failed = False  # True if an error ended the training: mlflow shows it

    def open(self, step: int) -> None:
        """Restore the running sums, remove what was logged after `step`, and open the logs."""
        state = self._state
        logger_names = self._spec.config.logger
        has_own_sum = len(state.loss_sums) == distributed.world_size()
        loss_sum = state.loss_sums[distributed.rank()] if has_own_sum else fmean(state.loss_sums)
        self._loss_sum = torch.tensor(loss_sum)
        self._num_loss_steps = state.num_loss_steps
        self._last_point = (step, state.seconds)
        self._run.truncate_logs(state.log_offsets)
        if not distributed.is_main_process():
            return
        self._loggers = open_loggers(self._spec.config, self._run.path)
        if "csv" in logger_names:
            self._table = (self._run.path / METRICS_FILE).open("a", encoding="utf-8", newline="")
            if self._table.tell() == 0:
                self._table.write("step,tag,value\n")
        if "tensorboard" in logger_names:
            threading.excepthook = self._on_thread_error
            self.writer = open_event_file(self._spec.config, self._run.path, step)

    def _on_thread_error(self, error: threading.ExceptHookArgs) -> None:
        """Ignore write errors in TensorBoard's thread. The next call of its writer raises them again."""
        if not (isinstance(error.exc_value, OSError) and "tensorboard" in type(error.thread).__module__):
            self._excepthook(error)

    def begin_step(self, module: GPTModule, step: int, schedule: Schedule) -> None:
        """Copy some of the weights before an update that gets a point."""
        config = self._spec.config
        if schedule.is_due(step, config.trainer.log_every) and distributed.is_main_process() and config.logger:
            self._rows_before_update = _sample_rows(module)

    def add_loss(self, module: GPTModule, loss: Tensor) -> None:
        """Add the loss of a step to the mean of the next point. Every rank must call this."""
        if module.loss_scale is None or not module.loss_scale.skipped:  # a skipped step may have an infinite loss
            self._loss_sum = self._loss_sum.to(module.device) + loss
            self._num_loss_steps += 1

    def write_point(
        self, fabric: Fabric, module: GPTModule, optimizer: torch.optim.Optimizer, step: int, loss: Tensor
    ) -> None:
        """Write the metrics of the steps since the last point. Every rank must call this.

        Args:
            fabric: Averages the losses of the ranks.
            module: The model, with the gradient norm of the last step.
            optimizer: Its optimizer, with the learning rates of the last step.
            step: The last step.
            loss: The loss of the last step on this rank, a scalar.

        Raises:
            NonFiniteError: The gradient is not finite, and was not checked before its update.
        """
        state = self._state
        trainer = self._spec.config.trainer
        if fabric.world_size > 1:  # some builds of PyTorch lack torch.distributed
            fabric.all_reduce(self._loss_sum, reduce_op="mean")  # in place
        mean_loss = float(self._loss_sum) / self._num_loss_steps if self._num_loss_steps else math.nan
        if math.isfinite(mean_loss):
            state.train_loss = mean_loss
        self._loss_sum = torch.zeros_like(self._loss_sum)  # stays on the device, because a copy would wait for the GPU
        self._num_loss_steps = 0

        last_step, last_seconds = self._last_point
        if not module.checks_each_step and not math.isfinite(module.grad_norm):
            raise module.non_finite_gradient(last_step, step, loss, "nothing was saved after it")
        self._last_point = (step, state.seconds)
        self.tokens_per_second = (step - last_step) * trainer.tokens_per_step / (state.seconds - last_seconds)

        metrics: dict[str, Any] = {"train_loss": mean_loss, "grad_norm": float(module.grad_norm)}
        rules = OPTIMIZERS[self._spec.config.optim.name]
        for group in optimizer.param_groups:  # lr, and matrix_lr if it is another
            metrics[rules[group["param_type"]].settings["lr"]] = group["lr"]
        metrics["tokens_per_second"] = self.tokens_per_second
        if peak := peak_flops(module.device, trainer.precision):
            flops = module.model.config.costs().flops_per_token(module.sequence_length) * self.tokens_per_second
            metrics["mfu"] = flops / (peak * fabric.world_size)
        if memory := peak_memory_bytes(module.device):
            metrics["peak_memory_gib"] = memory / 2**30
        if module.loss_scale is not None:
            metrics["loss_scale"] = float(module.loss_scale.value_on(module.device))
            metrics["skipped_steps"] = module.loss_scale.skipped_steps
        metrics["update_ratio"] = self._update_ratios(module)
        points = curve_points(metrics)
        self.write({curve: value for curve, value in points.items() if math.isfinite(value)}, step)

    def _update_ratios(self, module: GPTModule) -> dict[str, float]:
        """Return, for each layer, the norm of the last update divided by the norm of the weights.

        The ratios are estimated from every n-th row of the matrices. If fp16 skipped the step, there are none.
        """
        before = self._rows_before_update
        self._rows_before_update = None
        if before is None or (module.loss_scale is not None and module.loss_scale.skipped):
            return {}
        ratios = ((_sample_rows(module) - before).norm(dim=1) / before.norm(dim=1)).tolist()
        return {f"layer_{i}": ratio for i, ratio in enumerate(ratios, start=1)}

    def write_metrics(self, metrics: Mapping[str, Any], step: int) -> None:
        """Add a point to the curves of these metrics: see `curve_points`."""
        self.write(curve_points(metrics), step)

    def write(self, points: dict[str, float], step: int) -> None:
        """Add a point to each of the named curves."""
        if self.writer is not None:
            for curve, value in points.items():
                self.writer.add_scalar(curve, value, step)
        if self._table is not None:
            csv.writer(self._table, lineterminator="\n").writerows([step, *point] for point in points.items())
            self._table.flush()
        for logger in self._loggers:
            logger.log_metrics(points, step)

    def update_state(self) -> None:
        """Store the running sums and the sizes of the logs in the state of the run. Every rank must call this."""
        state = self._state
        loss_sum = float(self._loss_sum)
        state.num_loss_steps = self._num_loss_steps
        state.loss_sums = [loss_sum] * distributed.world_size()
        if distributed.world_size() > 1:
            torch.distributed.all_gather_object(state.loss_sums, loss_sum)
        if distributed.is_main_process():
            if self.writer is not None:
                self.writer.flush()
            state.log_offsets = self._run.sync_logs()

    def close(self) -> None:
        """Write what is still buffered, and close the logs."""
        if self._table is not None:
            with contextlib.suppress(OSError):  # on a full disk, `write` has raised this error already
                self._table.close()
        if self.writer is not None:
            with contextlib.suppress(FileNotFoundError):  # the run directory was deleted: `check_directory` reports it
                self.writer.close()
                threading.excepthook = self._excepthook  # if `close` failed, its thread may still raise an error
        close_loggers(self._loggers, self.has_failed)
        self._loggers = []


@torch.no_grad()
def _sample_rows(module: GPTModule) -> Tensor:
    """Return a copy of every n-th row of the matrices of each layer: (layers, weights)."""
    matrices = [p for block in module.model.blocks for p in block.parameters() if p.dim() == 2]
    # The stride is the same for all matrices, so that each has its weight in the norm.
    stride = -(-max(map(len, matrices)) // MAX_SAMPLED_ROWS)
    return torch.cat([p[::stride].flatten() for p in matrices]).view(len(module.model.blocks), -1)
