"""One uninterrupted stretch of training: Lightning's trainer with our callbacks."""

import logging
import warnings
from collections.abc import Sequence
from inspect import signature

from lightning import Callback, Trainer
from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gpt.errors import UserError, reason
from gpt.hardware.device import arithmetic
from gpt.hardware.threads import giving_way
from gpt.text.prepared import Corpora
from gpt.training.callbacks.base import Clock, Validation
from gpt.training.callbacks.progress import Progress
from gpt.training.callbacks.samples import Samples
from gpt.training.callbacks.stopping import EarlyStop, ExplosionWarning, MemorisingWarning
from gpt.training.checkpoints.resuming import restoring
from gpt.training.checkpoints.saving import CheckpointFiles, Checkpoints, Journal
from gpt.training.config.schedule import Schedule
from gpt.training.config.schema import Config
from gpt.training.distributed.launch import expect_answers, is_rank_0, on_all_ranks
from gpt.training.estimate.agreement import require_agreement
from gpt.training.loop import TrainBatches
from gpt.training.metrics.curves import Curves
from gpt.training.metrics.loggers import UserCurves, open_loggers
from gpt.training.metrics.metrics import Metrics
from gpt.training.module import GPTModule
from gpt.training.run.run import Run


class Training:
    """A module with its callbacks, ready to train until the horizon or a stop signal."""

    def __init__(
        self,
        config: Config,
        schedule: Schedule,
        corpora: Corpora,
        run: Run,
        weights: dict[str, Tensor] | None,
        amended: bool,
        callbacks: Sequence[Callback],
    ):
        self.module = GPTModule(config, schedule, corpora)
        if weights is not None:
            self.module.load_state_dict(weights)
        self._run, self._files = run, CheckpointFiles(run.payload)
        run.payload = None  # nothing large stays referenced while training
        run_dir = run.directory
        clock = Clock()
        self.curves = Curves(run_dir, clock)
        self.user_curves = UserCurves(self.curves)
        self.validation = Validation(clock)
        self.samples = Samples(run_dir, self.curves)
        self.metrics = Metrics(run, clock, self.validation, self.curves)
        self.early = EarlyStop(self.validation)
        self.checkpoints = Checkpoints(run, clock, self.validation, amended)
        self.progress = Progress(clock, self.validation, self.curves, self.samples)
        # The phases of a step, in order. A checkpoint is saved when all others are done with the step, and records how
        # long the files are that they have written to. Users' callbacks come before validation, as in Lightning.
        self.callbacks: list[Callback] = [clock, Journal(run, self.curves), self.curves, *callbacks]
        self.callbacks += [self.validation, ExplosionWarning(run_dir, self.validation, self.curves)]
        self.callbacks += [MemorisingWarning(self.validation, self.curves), self.samples, self.metrics, self.early]
        self.callbacks += [self.user_curves, self.checkpoints, self.progress]

    def run(self) -> None:
        """Train, from the checkpoint if there is one."""
        config = self.module.config
        others = open_loggers(config, self._run.directory) if is_rank_0() else []
        loggers = [self.user_curves, *others] if config.logger else []
        self.curves.loggers = others
        try:
            trainer = build_trainer(self.module, self.callbacks, self._files, loggers)
            with arithmetic(config.trainer.device, config.trainer.deterministic), giving_way():
                on_all_ranks(lambda: require_agreement(self.module))
                expect_answers(config.trainer.answer_minutes)
                trainer.fit(self.module, TrainBatches(self.module), ckpt_path=self._run.file, weights_only=True)
        except Exception as error:
            self._run.require_here()  # which tells more than what came of it
            # A callback that needs a logger where there is none, or a curve that nobody writes, or that is named twice.
            at_fault = "conditioned on metric" in str(error) or "more than one stateful callback" in str(error)
            if at_fault or isinstance(error, MisconfigurationException):
                raise UserError(reason(error)) from error
            if self._run.file is not None and not self.checkpoints.began:
                with restoring(self._run.file):
                    raise
            raise
        finally:
            for callback in (self.checkpoints, self.curves, self.progress):
                callback.close()
            for logger in others:
                if isinstance(logger, WandbLogger):  # whose run would go on in the next; Lightning ends that of mlflow
                    logger.experiment.finish()


def build_trainer(
    module: GPTModule, callbacks: list[Callback], files: CheckpointFiles, loggers: Sequence[Logger] = ()
) -> Trainer:
    """Lightning's trainer, with the callbacks in place of its own printing, logging and checkpointing."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)  # raised by Lightning itself
    settings = module.config.trainer
    strategy: str | ParallelStrategy = "auto"
    if settings.world_size > 1 or settings.strategy == "ddp":
        # The only buffers are the causal masks, which never change: they need not be sent around at every step.
        known = signature(DistributedDataParallel).parameters
        sync = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # before torch 2.13
        strategy = DDPStrategy(**{sync: False})  # type: ignore[arg-type]
    # Given, so that Lightning neither starts processes nor looks for a launcher.
    environment = TorchElasticEnvironment() if settings.world_size > 1 else LightningEnvironment()
    return Trainer(
        accelerator={"cuda": "gpu"}.get(settings.device, settings.device),
        devices=settings.devices or 1,
        num_nodes=settings.num_nodes or 1,
        strategy=strategy,
        max_steps=module.schedule.total_steps,
        accumulate_grad_batches=module.schedule.accumulation,
        callbacks=callbacks,
        plugins=[environment, files, *([module.loss_scaling] if module.loss_scaling else [])],
        logger=loggers,
        log_every_n_steps=min(settings.log_every, module.schedule.total_steps),  # it warns of more
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        check_val_every_n_epoch=None,  # with the next line, has callbacks expect validations within the epoch
        val_check_interval=module.schedule.validate_every * module.schedule.accumulation,
    )
