"""The training step: losses, gradients, and an update that is left out if the gradient is broken."""

import math
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor

from gpt.errors import NonFiniteError
from gpt.exchange.checkpoint import is_finite
from gpt.hardware.device import DTYPES, choose_precision
from gpt.model.fast.loss import chunked_next_token_loss
from gpt.model.transformer import GPT, GPTConfig
from gpt.text.bpe_dropout import parts_of, split_tokens
from gpt.text.tokenizer import Tokenizer
from gpt.training.config.schema import Config
from gpt.training.loss_scale import LossScale
from gpt.training.optim import build_optimizer, set_lr

REMEDY = "the last checkpoint is intact: start a new run from it with init_from= and lower rates"


class GPTModule(LightningModule):
    """A GPT and its training step. The state dict is the model's own, so that checkpoints have plain names.

    For the update that follows so many others, `rate_factor` gives the fraction of the peak rates, and `progress` that
    of the run which has passed.
    """

    parts: Tensor  # (V, 2) of bpe_dropout.py

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        rate_factor: Callable[[int], float],
        progress: Callable[[int], float] = lambda step: 0.0,
    ):
        super().__init__()
        self.automatic_optimization = False
        self.config, self.rate_factor, self.progress = config, rate_factor, progress
        torch.manual_seed(config.seed)
        self.model = GPT(GPTConfig(vocab_size=tokenizer.vocab_size, **asdict(config.model)))
        if config.data.bpe_dropout:
            self.register_buffer("parts", parts_of(tokenizer), persistent=False)
        self.model.compute_in(DTYPES.get(config.trainer.precision, torch.float32))
        self.loss_scale = LossScale(config.trainer.device) if config.trainer.precision == "fp16" else None
        self.model.checkpointing = config.trainer.activation_checkpointing
        if config.trainer.compile == "true":
            for block in self.model.blocks:  # one graph serves them all
                # For each length of window anew, or else a resumed run would have another graph.
                block.compile(dynamic=False if config.trainer.short_window else None)
        self._weights = list(self.model.parameters())  # collecting them takes a third as long as their norm
        self.logged: dict[str, None] = {}  # the names that callbacks have logged since the last step, in order
        self.grad_norm = torch.zeros(())  # of the last step, before clipping
        self.window = config.model.context_length  # tokens of a window in the last step
        # To look at a norm, the host waits for the GPU, which then waits for the host. So curves.py looks at it there.
        self.checks_each_step = config.trainer.device != "cuda" or self.loss_scale is not None

    def training_step(self, micro_batches: list[tuple[Tensor, Tensor]], batch_idx: int) -> Tensor:
        """Take one optimizer step on micro-batches of inputs and targets, each (B, T); returns its loss, a scalar."""
        optimizer, step, count = self.optimizers(), self.global_step, len(micro_batches)
        assert isinstance(optimizer, LightningOptimizer)
        set_lr(optimizer.optimizer, self.rate_factor(step))
        optimizer.zero_grad()
        mean = torch.zeros((), device=self.device)
        self.window = micro_batches[0][0].shape[1]
        for i, (idx, targets) in enumerate(micro_batches):
            if chance := (self.config.data.bpe_dropout or 0.0) * (1.0 - self.progress(step)):
                generator = torch.Generator(idx.device).manual_seed(self._seed_of(step * count + i))
                idx, targets = split_tokens(idx, targets, self.parts, chance, generator)
            if self.config.model.dropout:
                # Dropout is a function of the seed and the step as well, so there is no generator whose state to save.
                torch.manual_seed(self._seed_of(step * count + i))
            with self._exchange_gradients(i + 1 == count):
                loss = self.loss(idx, targets)
                scaled = self.loss_scale.scaled(loss / count) if self.loss_scale else loss / count
                self.manual_backward(scaled)
            mean += loss.detach() / count

        if self.loss_scale:
            self.loss_scale.unscale(optimizer.optimizer)
        self.grad_norm = self.measure_gradients()
        is_broken = self.checks_each_step and not math.isfinite(self.grad_norm)
        goes_on = self.loss_scale.adapt(skipped=is_broken) if self.loss_scale else not is_broken
        if not goes_on:
            raise self.broken_gradient(step, step + 1, mean, "no update was made")
        if self.config.optim.clip and not is_broken:
            torch.nn.utils.clip_grads_with_norm_(self._weights, self.config.optim.clip, self.grad_norm)
        optimizer.step(skip=is_broken)
        return mean

    def _seed_of(self, micro_batch: int) -> int:
        return hash((self.config.seed, micro_batch, self.global_rank))

    def loss(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Mean nats per token of inputs and targets, each (B, T)."""
        scale = self.loss_scale.of(idx.device) if self.loss_scale else 1.0
        places = self.config.model.context_length // idx.shape[1]
        return chunked_next_token_loss(*self.model.hidden_and_head(idx, places), targets, scale=scale)

    def _exchange_gradients(self, now: bool):
        """Have ranks add up their gradients in this backward pass, or leave it for a later one of the step."""
        strategy = self.trainer.strategy
        waits = isinstance(strategy, ParallelStrategy) and not now
        return strategy.block_backward_sync() if waits else nullcontext()  # type: ignore[attr-defined]

    def log(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Log as Lightning does, which does not tell what was logged when."""
        super().log(name, *args, **kwargs)
        self.logged[name] = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Muon needs only the direction of its updates, so bfloat16 is enough in runs of bf16, and in others wherever it
        # is fast. In fp16 most of them would be zero.
        precision, device = self.config.trainer.precision, torch.device(self.config.trainer.device)
        muon = torch.bfloat16 if "bf16" in (precision, choose_precision("auto", device)) else torch.float32
        weights = dict(self.model.named_parameters())
        return build_optimizer(weights, self.config.model.num_heads, self.config.optim, muon)

    def measure_gradients(self) -> Tensor:
        """The norm of the whole gradient, a scalar."""
        return torch.nn.utils.get_total_norm([p.grad for p in self._weights if p.grad is not None])

    def broken_gradient(self, checked: int, step: int, loss: Tensor, consequence: str) -> NonFiniteError:
        """The error for a gradient of `step` that is not finite; the first `checked` steps had finite ones."""
        return NonFiniteError(
            f"{'step' if step == checked + 1 else f'steps {checked + 1} to'} {step}: the gradient is not finite, "
            f"so {consequence} (loss {float(loss):.4g}); {REMEDY}\n  gradient norms: {self._norms_by_layer()}"
            + (self.loss_scale.history if self.loss_scale else "")
        )

    def _norms_by_layer(self) -> str:
        squares: dict[str, float] = defaultdict(float)
        for name, p in self.model.named_parameters():
            if p.grad is not None:
                layer = ".".join(name.split(".")[: 2 if name.startswith("blocks.") else 1])
                squares[layer] += float(p.grad.float().square().sum())
        return ", ".join(f"{layer} {math.sqrt(square):.3g}" for layer, square in squares.items())

    def require_finite_weights(self) -> None:
        """Raise `NonFiniteError` rather than let broken weights be saved over good ones."""
        broken = [name for name, p in self.model.named_parameters() if not is_finite(p)]
        if broken:
            raise NonFiniteError(
                f"step {self.global_step}: the update has left weights that are not finite ({', '.join(broken[:3])}), "
                f"which are not saved; {REMEDY}"
            )

    def state_dict(self, *args, **kwargs):
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict, *args, **kwargs):
        self.model.load_state_dict(state_dict, *args, **kwargs)
