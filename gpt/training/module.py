"""The training step, as Lightning calls it: loss, gradient, and an update that is skipped if the gradient is broken."""

import math
from collections import defaultdict
from dataclasses import asdict

import torch
from lightning import LightningModule
from torch import Tensor

from gpt.errors import NonFiniteError
from gpt.exchange.checkpoint import is_finite
from gpt.hardware.device import DTYPES, choose_precision
from gpt.model.fast.loss import chunked_next_token_loss
from gpt.model.transformer import GPT, GPTConfig
from gpt.text.prepared import Corpora
from gpt.training.config.schedule import MOST_STEPS, Schedule
from gpt.training.config.schema import Config
from gpt.training.loss_scale import LossScaling
from gpt.training.optim import build_optimizer, set_lr

REMEDY = "the last checkpoint is intact: start a new run from it with init_from= and lower rates"


class GPTModule(LightningModule):
    """A GPT and its training step. The state dict is the model's own, so that checkpoints have plain names."""

    def __init__(self, config: Config, schedule: Schedule, corpora: Corpora):
        super().__init__()
        self.config, self.schedule, self.corpora = config, schedule, corpora
        torch.manual_seed(config.seed)
        self.model = GPT(GPTConfig(vocab_size=corpora.tokenizer.vocab_size, **asdict(config.model)))
        self.model.compute_in(DTYPES.get(config.trainer.precision, torch.float32))
        self.loss_scaling = LossScaling(config.trainer.device) if config.trainer.precision == "fp16" else None
        self.model.checkpointing = config.trainer.activation_checkpointing
        if config.trainer.compile == "true":
            for block in self.model.blocks:  # one graph serves them all
                block.compile()
        self._parameters_list = list(self.model.parameters())  # collecting them takes a third as long as their norm
        self.step_loss = torch.zeros(())  # running mean over this step's micro-batches, on this rank
        self.grad_norm = torch.zeros(())  # of the last step, before clipping
        # To look at a norm, the host waits for the GPU, which then waits for the host. So curves.py looks at it there.
        self.checks_each_step = config.trainer.device != "cuda" or self.loss_scaling is not None
        self.share, self.at_milestone = 0.0, False  # of the time that has passed, where that is the horizon
        self.between_updates = False  # whether the state is that of a finished step and may be saved

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of one micro-batch of inputs and targets, each (B, T)."""
        accumulation = self.schedule.accumulation
        i = batch_idx % accumulation
        if self.config.model.dropout:
            # Dropout is a function of the seed and the step as well, so there is no generator whose state to save.
            torch.manual_seed(hash((self.config.seed, self.global_step * accumulation + i, self.global_rank)))
        loss = self.loss(*batch)
        share = loss.detach() / accumulation
        self.step_loss = share if i == 0 else self.step_loss + share
        return loss

    def loss(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Mean nats per token of inputs and targets, each (B, T)."""
        scale = 1.0 if self.loss_scaling is None else self.loss_scaling.scale(idx.device)
        return chunked_next_token_loss(*self.model.hidden_and_head(idx), targets, scale=scale)

    def expected_steps(self) -> int:
        """The steps of the whole run; where its horizon is a time, as many as it takes at the speed so far."""
        if self.schedule.total_steps < MOST_STEPS:
            return self.schedule.total_steps
        return max(self.global_step, round(self.global_step / self.share)) if self.share else self.global_step + 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Muon needs only the direction of its updates, so bfloat16 is enough wherever it is fast, in fp32 runs too. In
        # fp16 most of them would be zero.
        fast = choose_precision("auto", torch.device(self.config.trainer.device))
        muon = torch.bfloat16 if fast == "bf16" else torch.float32
        weights = dict(self.model.named_parameters())
        return build_optimizer(weights, self.config.model.num_heads, self.config.optim, muon)

    def measure_gradients(self) -> Tensor:
        """The norm of the whole gradient, a scalar."""
        return torch.nn.utils.get_total_norm([p.grad for p in self._parameters_list if p.grad is not None])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        set_lr(optimizer, self.schedule.rate_factor(self.global_step, self.share, self.config.optim))
        self.grad_norm = self.measure_gradients()
        if self.checks_each_step:
            self.require_finite_gradient(self.global_step, self.global_step + 1, "no update was made")
        if self.config.optim.clip:
            torch.nn.utils.clip_grads_with_norm_(self._parameters_list, self.config.optim.clip, self.grad_norm)
        self.between_updates = False

    def on_train_start(self) -> None:
        self.between_updates = True

    def on_train_batch_end(self, outputs, batch, batch_idx: int) -> None:
        self.between_updates = True  # Lightning calls this after all callbacks are done with the step

    def require_finite_gradient(self, checked: int, step: int, consequence: str) -> None:
        """Raise `NonFiniteError` if the gradient of `step` is not finite; the first `checked` steps had finite ones."""
        if math.isfinite(self.grad_norm):
            return
        windows = self.schedule.windows_per_step
        raise NonFiniteError(
            f"{'step' if step == checked + 1 else f'steps {checked + 1} to'} {step}: the gradient is not finite, "
            f"so {consequence} (loss {float(self.step_loss):.4g}; windows {checked * windows} to {step * windows - 1} "
            f"of the order of seed {self.config.order_seed}); {REMEDY}\n  gradient norms: {self._norms_by_layer()}"
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
