"""One uninterrupted stretch of training: Lightning's trainer with our callbacks."""

import logging
import warnings
from collections import Counter
from collections.abc import Sequence
from inspect import signature
from pathlib import Path

import torch
from lightning import Callback, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import ClusterEnvironment, LightningEnvironment
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.nn.parallel import DistributedDataParallel

from gpt.errors import UserError
from gpt.hardware import arithmetic, peak_flops
from gpt.text.shards import Corpora
from gpt.threads import giving_way
from gpt.training.config import Config
from gpt.training.curves import Curves
from gpt.training.deadline import Deadline
from gpt.training.early_stop import EarlyStop
from gpt.training.embeddings import Embeddings
from gpt.training.journal import Journal
from gpt.training.loader import GPTData
from gpt.training.loggers import UserCurves, UserValues, close_loggers, open_loggers
from gpt.training.metrics import Metrics, References
from gpt.training.module import GPTModule
from gpt.training.plan import Plan
from gpt.training.progress import Progress
from gpt.training.ranks import Ranks
from gpt.training.record import Record
from gpt.training.resuming import require_like
from gpt.training.samples import AttentionMaps, Samples
from gpt.training.saving import BestCheckpoint, CheckpointFiles, LastCheckpoint
from gpt.training.steps import Clock
from gpt.training.turning import Turning
from gpt.training.updates import UpdateRatios
from gpt.training.validation import Validation


def module_for(config: Config, plan: Plan, corpora: Corpora) -> GPTModule:
    """A new model with its training step, for the configured strategy."""
    if config.trainer.strategy != "fsdp":
        return GPTModule(config, plan, corpora)
    from gpt.training.sharding import ShardedModule  # needs a PyTorch with torch.distributed

    return ShardedModule(config, plan, corpora)


class Fitting:
    """A module with its callbacks, ready to train until the horizon or a stop signal."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        corpora: Corpora,
        run_dir: Path,
        weights: dict | None = None,
        callbacks: Sequence[Callback] = (),
    ):
        self.module = module_for(config, plan, corpora)
        if weights is not None:
            self.module.load_state_dict(weights)
        self._run_dir = run_dir
        self.clock = Clock()
        peak = peak_flops(torch.device(config.trainer.device), config.trainer.precision)
        self.curves = Curves(run_dir, self.clock, peak, config.logger)
        self.user_curves = UserCurves(self.curves)
        self.validation = Validation(run_dir, self.clock)
        self.samples = Samples(run_dir, self.curves)
        references = References(self.curves)
        self.metrics = Metrics(run_dir, self.clock, self.validation, self.curves, references)
        self.early = EarlyStop(self.validation, together=bool(callbacks))
        self.last = LastCheckpoint(run_dir, self.clock, self.validation)
        # Order matters: a checkpoint, of the best score or the last step, is saved when all others are done with the
        # step, and records how long the files are that they have written to. Users' callbacks come before validation,
        # as in Lightning.
        first = [self.clock, Deadline(run_dir, self.clock), self.curves, UpdateRatios(self.curves)]
        first += [Journal(run_dir, self.curves), Record()]
        last = [self.validation, Turning(self.validation, self.curves), self.samples, AttentionMaps(self.curves)]
        last += [Embeddings(run_dir, self.curves), references, self.metrics, self.early]
        last += [UserValues(self.curves, self.user_curves), BestCheckpoint(run_dir, self.clock, self.validation)]
        last += [self.last, Progress(self.validation, self.curves, self.samples)]
        self._ours: list[Callback] = [*first, *last]
        self.callbacks: list[Callback] = [*first, *callbacks, *last]
        states = Counter(callback.state_key for callback in self.callbacks if callback.state_dict())
        if twice := next((callback for callback in callbacks if states[callback.state_key] > 1), None):
            raise UserError(f"callbacks: the state of {twice.state_key} would be stored twice: name it once")

    def require_like(self, file: Path, payload: dict) -> None:
        """Raise `UserError` unless this run can continue from what was read of a checkpoint."""
        require_like(file, payload, self._fresh_state(payload))

    def run(self, ranks: Ranks, files: CheckpointFiles, file: Path | None = None) -> None:
        """Train, from the checkpoint `file` if there is one."""
        config = self.module.config
        others = open_loggers(config, self._run_dir) if ranks.rank == 0 else []
        loggers = [self.user_curves, *others] if config.logger else []
        self.curves.loggers = others
        try:
            trainer = build_trainer(self.module, self.callbacks, [files, Environment(ranks)], loggers)
            assert trainer.world_size == config.trainer.world_size == ranks.world_size
            with arithmetic(config.trainer.device, config.trainer.deterministic), giving_way():
                trainer.fit(self.module, datamodule=GPTData(self.module), ckpt_path=file, weights_only=True)
        except (MisconfigurationException, RuntimeError) as error:
            # A callback that needs a logger where there is none, or a curve that nobody writes.
            if isinstance(error, RuntimeError) and "conditioned on metric" not in str(error):
                raise
            raise UserError(" ".join(str(error).split())) from error
        finally:
            self.last.close()
            self.curves.close()
            close_loggers(others)

    def _fresh_state(self, payload: dict) -> dict:
        """The state of this run before its first step, to compare a checkpoint with; without memory for tensors."""
        weights = {name: torch.empty_like(w, device="meta") for name, w in self.module.model.named_parameters()}
        optimizer = self.module.make_optimizer(weights)
        callbacks = {c.state_key: state for c in self._ours if (state := c.state_dict())}
        stored = payload["callbacks"]
        if isinstance(stored.get("Curves"), dict) and isinstance(stored["Curves"].get("losses"), list):
            callbacks["Curves"]["losses"] = [0.0] * max(1, len(stored["Curves"]["losses"]))  # one for each rank
        if isinstance(stored.get("Journal"), dict) and Journal.describes(stored["Journal"].get("events")):
            callbacks["Journal"] = callbacks["Journal"] | {"events": stored["Journal"]["events"]}
            if "table" not in stored["Journal"]:  # an older version had none
                del callbacks["Journal"]["table"]
        else:
            callbacks["Journal"] = callbacks["Journal"] | {"events": {"names": "sizes"}}  # like nothing that is stored
        if isinstance(stored.get("Curves"), dict) and "loss" in stored["Curves"]:
            callbacks["Curves"]["loss"] = 0.0
        for name in {"Turning", "References"} - set(stored):  # an older version had none
            del callbacks[name]
        if isinstance(stored.get("References"), dict) and isinstance(stored["References"].get("passed_at"), dict):
            callbacks["References"] = {"passed_at": dict.fromkeys(stored["References"]["passed_at"], 0)}
        if "UserValues" in stored:
            names = stored["UserValues"].get("values") if isinstance(stored["UserValues"], dict) else None
            callbacks["UserValues"] = {"values": dict.fromkeys(names, 0.0) if isinstance(names, dict) else {}}
        return {"state_dict": weights, "optimizer_states": [optimizer.state_dict()], "callbacks": callbacks}


class Environment(LightningEnvironment):
    """Tells Lightning which rank this process is, so that it neither starts processes nor looks for a launcher."""

    def __init__(self, ranks: Ranks):
        super().__init__()
        self._ranks = ranks
        self.set_global_rank(ranks.rank)

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def local_rank(self) -> int:
        return self._ranks.local_rank

    def set_global_rank(self, rank: int) -> None:
        super().set_global_rank(self._ranks.rank)  # Lightning counts machines as if they were numbered in order

    def teardown(self) -> None:
        """Leave the variables of the launcher as they are."""


def build_trainer(
    module: GPTModule,
    callbacks: list[Callback],
    plugins: list[ClusterEnvironment | CheckpointIO],
    loggers: Sequence[Logger] = (),
) -> Trainer:
    """Lightning's trainer, with the callbacks in place of its own printing, logging and checkpointing."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)  # raised by Lightning itself
    settings = module.config.trainer
    strategy: str | ParallelStrategy = "auto"
    if settings.strategy == "fsdp":
        from gpt.training.sharding import Sharding

        strategy = Sharding(settings.world_size)
    elif settings.world_size > 1 or settings.strategy == "ddp":
        # The only buffers are the causal masks, which never change: they need not be sent around at every step.
        known = signature(DistributedDataParallel).parameters
        sync = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # before torch 2.13
        strategy = DDPStrategy(**{sync: False})  # type: ignore[arg-type]
    return Trainer(
        accelerator={"cuda": "gpu"}.get(settings.device, settings.device),
        devices=settings.devices or 1,
        num_nodes=settings.num_nodes or 1,
        strategy=strategy,
        max_steps=module.plan.total_steps,
        accumulate_grad_batches=module.plan.accumulation,
        callbacks=callbacks,
        plugins=[*plugins, *([module.loss_scaling] if module.loss_scaling else [])],
        logger=loggers,
        log_every_n_steps=min(settings.log_every, module.plan.total_steps),  # it warns of more
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=None,  # with the next line, has callbacks expect validations within the epoch
        val_check_interval=module.plan.validate_every * module.plan.accumulation,
        use_distributed_sampler=False,
    )
