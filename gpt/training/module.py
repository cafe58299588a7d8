"""The model and the data as Lightning wants them. Of the training code only this and callbacks.py know Lightning."""

import logging
import math
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace

import torch
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.plugins.io import CheckpointIO
from torch import Tensor

from gpt.errors import NonFiniteError
from gpt.exchange import checkpoint
from gpt.hardware import choose_precision, is_out_of_memory, release_memory
from gpt.model.loss import next_token_loss
from gpt.model.transformer import GPT, GPTConfig
from gpt.text.batches import mixed_batch
from gpt.text.shards import Corpora
from gpt.training.config import Config, parse_horizon, to_plain
from gpt.training.optim import build_optimizer, lr_factor, set_lr

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Plan:
    """What the configuration comes to on this machine and corpus, once everything automatic is decided."""

    total_steps: int
    windows_per_step: int  # over all devices
    micro_batch_size: int  # on each device
    accumulation: int  # micro-batches of a step, on each device
    automatic: bool = False  # whether the micro-batch may be made smaller where memory does not suffice

    def due(self, step: int, every: int) -> bool:
        """Whether what happens every so many steps, and at the horizon, happens after this one."""
        return step % every == 0 or step == self.total_steps

    def with_smaller_micro_batch(self) -> "Plan":
        """The same steps in micro-batches of half the size, or of the next size below that divides a step."""
        windows = self.micro_batch_size * self.accumulation
        size = next(size for size in range(max(1, self.micro_batch_size // 2), 0, -1) if windows % size == 0)
        return replace(self, micro_batch_size=size, accumulation=windows // size)


class GPTModule(LightningModule):
    """The training step of a GPT. Its state dict is the model's own, so that checkpoints carry plain names."""

    def __init__(self, config: Config, plan: Plan, corpora: Corpora, commit: str | None = None):
        super().__init__()
        self.config = config
        self.plan = plan
        self.corpora = corpora
        self.commit = commit
        torch.manual_seed(config.seed)
        self.model = GPT(GPTConfig(vocab_size=corpora.tokenizer.vocab_size, **asdict(config.model)))
        self.model.compute_in(DTYPES.get(config.trainer.precision, torch.float32))
        self.model.checkpointing = config.trainer.activation_checkpointing
        if config.trainer.compile == "true":
            for block in self.model.blocks:  # in place, so that state dicts keep their names
                block.compile()
        self._trained = list(self.model.parameters())  # looking for them costs a third as much as their norm
        self.step_loss = torch.zeros(())  # of the micro-batches of this step so far, each with its share
        self.grad_norm = torch.zeros(())  # of the last step, before clipping
        self.between_updates = False  # whether all state is that of a finished step, so that it may be saved

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of one micro-batch of inputs and targets, each (B, T)."""
        if self.config.model.dropout:
            # Dropout, too, is a function of the seed and the step, so there is no generator whose state to save.
            torch.manual_seed(hash((self.config.seed, self._micro_step(batch_idx), self.global_rank)))
        loss = self.training_loss(*batch)
        share = loss.detach() / self.plan.accumulation
        self.step_loss = share if batch_idx % self.plan.accumulation == 0 else self.step_loss + share
        return loss

    def training_loss(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Mean nats per token of inputs and targets, each (B, T)."""
        return next_token_loss(*self.model.hidden_and_head(idx), targets)

    def _micro_step(self, batch_idx: int) -> int:
        return self.global_step * self.plan.accumulation + batch_idx % self.plan.accumulation

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Muon only needs the direction of its updates: bfloat16 suffices wherever it is fast, in fp32 runs too.
        fast = choose_precision("auto", torch.device(self.config.trainer.device))
        weights = dict(self.model.named_parameters())
        return build_optimizer(weights, self.config.model.num_heads, self.config.optim, DTYPES[fast])

    def measure_gradients(self) -> Tensor:
        """The norm of all gradients together, a scalar."""
        return torch.nn.utils.get_total_norm([p.grad for p in self._trained if p.grad is not None])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        set_lr(optimizer, lr_factor(self.global_step, self.plan.total_steps, self.config.optim))
        self.grad_norm = self.measure_gradients()
        if not math.isfinite(self.grad_norm):
            raise NonFiniteError(self._describe_step())
        if self.config.optim.clip:
            torch.nn.utils.clip_grads_with_norm_(self._trained, self.config.optim.clip, self.grad_norm)
        self.between_updates = False

    def on_train_start(self) -> None:
        self.between_updates = True

    def on_train_batch_end(self, outputs, batch, batch_idx: int) -> None:
        self.between_updates = True  # Lightning calls this when all callbacks are done with the step

    def require_finite_weights(self) -> None:
        """Raise `NonFiniteError` rather than let weights that are not finite be saved over good ones."""
        broken = [name for name, p in self.model.named_parameters() if not p.isfinite().all()]
        if broken:
            raise NonFiniteError(
                f"step {self.global_step}: the update has left weights that are not finite ({', '.join(broken[:3])}), "
                f"which are not saved; {self._REMEDY}"
            )

    _REMEDY = "the last checkpoint is intact: begin again from it with init_from= and lower rates"

    def _describe_step(self) -> str:
        """What there is to know of a step whose gradient is not finite: its loss, its windows, each layer's norm."""
        step, windows = self.global_step, self.plan.windows_per_step
        squares: dict[str, float] = defaultdict(float)
        for name, p in self.model.named_parameters():
            if p.grad is not None:
                layer = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else name.split(".")[0]
                squares[layer] += float(p.grad.float().square().sum())
        norms = ", ".join(f"{layer} {math.sqrt(square):.3g}" for layer, square in squares.items())
        return (
            f"step {step + 1}: the gradient is not finite, so no update was made (loss {float(self.step_loss):.4g}; "
            f"windows {step * windows} to {(step + 1) * windows - 1} of the order of seed {self.config.seed}); "
            f"{self._REMEDY}\n  gradient norms: {norms}"
        )

    def state_dict(self, *args, **kwargs):
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict, *args, **kwargs):
        self.model.load_state_dict(state_dict, *args, **kwargs)

    def on_load_checkpoint(self, payload: dict) -> None:
        # Training goes on at the first micro-batch of a step, whatever their size and number was when it was saved.
        loop = payload["loops"]["fit_loop"]
        for kind in ("total", "current"):
            counts = loop["epoch_loop.batch_progress"][kind]
            counts |= dict.fromkeys(counts, payload["step"] * self.plan.accumulation)
        loop["epoch_loop.state_dict"]["_batches_that_stepped"] = payload["step"]

    def on_save_checkpoint(self, payload: dict) -> None:
        payload |= {
            "format": checkpoint.FORMAT,
            "step": self.global_step,
            "config": to_plain(self.config),
            "plan": asdict(self.plan),
            "tokenizer": self.corpora.tokenizer.to_dict(),
            "corpus": self.corpora.key,
            "git_commit": self.commit,
            "versions": checkpoint.versions(),
            "threads": torch.get_num_threads(),
        }


class TrainBatches:
    """The micro-batches of a whole run as one long epoch, from the trainer's present step on.

    A thread makes the next one while the model is at work on the present one.
    """

    def __init__(self, module: GPTModule):
        self._module = module

    def __len__(self) -> int:
        return self._module.plan.total_steps * self._module.plan.accumulation

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        module, plan = self._module, self._module.plan
        rank, devices = module.global_rank, module.trainer.world_size

        def make(micro_step: int) -> tuple[Tensor, Tensor]:
            first = (micro_step * devices + rank) * plan.micro_batch_size
            return train_batch(module.corpora, module.config, first, plan.micro_batch_size)

        with ThreadPoolExecutor(1) as reader:
            begin = module.global_step * plan.accumulation
            following = reader.submit(make, begin)
            for micro_step in range(begin, len(self)):
                batch = following.result()
                if micro_step + 1 < len(self):
                    following = reader.submit(make, micro_step + 1)
                yield batch


def train_batch(corpora: Corpora, config: Config, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each (size, T): the windows of a run from number `first` on."""
    tokens = [source.train for source in corpora.sources]
    return mixed_batch(tokens, corpora.shares, config.seed, first, size, config.model.context_length)


class GPTData(LightningDataModule):
    """The training batches of the prepared corpora."""

    def __init__(self, module: GPTModule):
        super().__init__()
        self.module = module

    def train_dataloader(self) -> TrainBatches:
        return TrainBatches(self.module)


def make_plan(config: Config, corpora: Corpora, automatic: bool, say: Callable[[str], None]) -> tuple[Config, Plan]:
    """Turn the horizon into steps, once. A time is measured first, and the configuration then says steps instead."""
    windows = config.trainer.tokens_per_step // config.model.context_length
    micro_batch = int(config.trainer.micro_batch_size)
    plan = Plan(1, windows, micro_batch, windows // (micro_batch * config.trainer.devices), automatic)
    horizon = parse_horizon(config.horizon)
    if horizon.unit == "seconds":
        plan, seconds = measure(config, plan, corpora)
        config = replace(config, trainer=replace(config.trainer, micro_batch_size=str(plan.micro_batch_size)))
        steps = max(1, round(horizon.amount / seconds))
        say(f"horizon={config.horizon}: {steps} steps, at {seconds * 1000:.1f} ms each as measured just now")
        config = replace(config, horizon=f"{steps}steps")
    else:
        per_step = config.trainer.tokens_per_step
        per_unit = {"steps": 1.0, "tokens": 1 / per_step, "epochs": corpora.train_tokens / per_step}[horizon.unit]
        steps = max(1, round(horizon.amount * per_unit))
    return config, replace(plan, total_steps=steps)


def measure(config: Config, plan: Plan, corpora: Corpora) -> tuple[Plan, float]:
    """`seconds_per_step`, with as small a micro-batch as memory asks for where the plan may choose it."""
    while True:
        try:
            return plan, seconds_per_step(config, plan, corpora)
        except Exception as error:
            if not is_out_of_memory(error) or not plan.automatic or plan.micro_batch_size == 1:
                raise
        release_memory()
        plan = plan.with_smaller_micro_batch()


def seconds_per_step(config: Config, plan: Plan, corpora: Corpora, at_most: float = 5.0) -> float:
    """The mean time of a training step, from a few steps of a model of its own that is then thrown away."""
    module = GPTModule(config, replace(plan, total_steps=1000), corpora)
    device = torch.device(config.trainer.device)
    module.to(device)
    optimizer = module.configure_optimizers()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - begin < at_most and len(times) < 100):
        start = time.perf_counter()
        for _ in range(plan.accumulation):
            idx, targets = train_batch(corpora, config, 0, plan.micro_batch_size)
            module.training_loss(idx.to(device), targets.to(device)).backward()
        math.isfinite(module.measure_gradients())  # waits for it, as a real step does
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    # The first half warms up. A median of the rest would leave out hiccups, of which a run has its share.
    return statistics.fmean(times[len(times) // 2 :])


def build_trainer(config: Config, plan: Plan, callbacks: list[Callback], files: CheckpointIO) -> Trainer:
    """Lightning's trainer with its own printing, logging and checkpointing replaced by the callbacks."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)  # Lightning's own, with newer versions of torch
    warnings.filterwarnings("ignore", ".*ended before the epoch ended.*")  # our order follows from the step alone
    settings = config.trainer
    return Trainer(
        accelerator={"cuda": "gpu"}.get(settings.device, settings.device),
        devices=settings.devices,
        strategy=settings.strategy,
        max_steps=plan.total_steps,
        accumulate_grad_batches=plan.accumulation,
        callbacks=callbacks,
        plugins=[files],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )
