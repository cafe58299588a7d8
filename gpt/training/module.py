"""The training step, as Lightning calls it: loss, gradient, and an update that is skipped if the gradient is broken."""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict

import torch
from lightning import LightningModule
from torch import Tensor

from gpt.errors import NonFiniteError
from gpt.exchange.assembly import is_finite
from gpt.hardware import DTYPES, choose_precision
from gpt.model.chunked_loss import chunked_next_token_loss
from gpt.model.compiling import compile_in_place
from gpt.model.transformer import GPT, GPTConfig
from gpt.text.shards import Corpora
from gpt.training.config import Config
from gpt.training.guard import REMEDY, LateGuard, broken_step, norms_by_layer
from gpt.training.loss_scale import LossScaling
from gpt.training.optim import build_optimizer, lr_factor, set_lr
from gpt.training.plan import Plan


class GPTModule(LightningModule):
    """A GPT and its training step. The state dict is the model's own, so that checkpoints have plain names."""

    def __init__(self, config: Config, plan: Plan, corpora: Corpora):
        super().__init__()
        self.config, self.plan, self.corpora = config, plan, corpora
        torch.manual_seed(config.seed)
        self.model = GPT(GPTConfig(vocab_size=corpora.tokenizer.vocab_size, **asdict(config.model)))
        self.model.compute_in(DTYPES.get(config.trainer.precision, torch.float32))
        self.loss_scaling = LossScaling(config.trainer.device) if config.trainer.precision == "fp16" else None
        self.model.checkpointing = config.trainer.activation_checkpointing
        if config.trainer.compile == "true":
            compile_in_place(self.model, config.trainer.device)
        self._parameters_list = list(self.model.parameters())  # collecting them takes a third as long as their norm
        self.step_loss = torch.zeros(())  # running mean over this step's micro-batches, on this rank
        self.grad_norm = torch.zeros(())  # of the last step, before clipping
        # Where reading the norm at once would make the GPU wait. The scaling of losses needs to know it at once.
        late = config.trainer.device == "cuda" and self.loss_scaling is None
        self.late_guard = LateGuard(plan, config.seed) if late else None
        self.between_updates = False  # whether the state is that of a finished step and may be saved

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of one micro-batch of inputs and targets, each (B, T)."""
        if self.config.model.dropout:
            # Dropout is a function of the seed and the step as well, so there is no generator whose state to save.
            torch.manual_seed(hash((self.config.seed, self._micro_step(batch_idx), self.global_rank)))
        loss = self.loss(*batch)
        share = loss.detach() / self.plan.accumulation
        self.step_loss = share if batch_idx % self.plan.accumulation == 0 else self.step_loss + share
        return loss

    def loss(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Mean nats per token of inputs and targets, each (B, T)."""
        scale = 1.0 if self.loss_scaling is None else self.loss_scaling.scale(idx.device)
        return chunked_next_token_loss(*self.model.hidden_and_head(idx), targets, scale=scale)

    def whole_weights(self) -> AbstractContextManager[None]:
        """A context in which this rank may run the model alone: it does here, but not in sharding.py."""
        return nullcontext()

    def _micro_step(self, batch_idx: int) -> int:
        return self.global_step * self.plan.accumulation + batch_idx % self.plan.accumulation

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(dict(self.model.named_parameters()))

    def make_optimizer(self, weights: dict[str, Tensor]) -> torch.optim.Optimizer:
        """The configured optimizer for weights by name."""
        # Muon needs only the direction of its updates, so bfloat16 is enough wherever it is fast, in fp32 runs too. In
        # fp16 most of them would be zero.
        fast = choose_precision("auto", torch.device(self.config.trainer.device))
        muon = torch.bfloat16 if fast == "bf16" else torch.float32
        return build_optimizer(weights, self.config.model.num_heads, self.config.optim, muon)

    def measure_gradients(self) -> Tensor:
        """The norm of the whole gradient, a scalar."""
        return torch.nn.utils.get_total_norm([p.grad for p in self._parameters_list if p.grad is not None])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        plan = self.plan
        factor = lr_factor(self.global_step, plan.total_steps, self.config.optim, plan.extended_at, plan.factor_then)
        set_lr(optimizer, factor)
        self.grad_norm = self.measure_gradients()
        if self.late_guard is not None:
            self.late_guard.watch(self.global_step, self.step_loss, self.grad_norm)
        elif not math.isfinite(self.grad_norm):
            norms = f"\n  gradient norms: {norms_by_layer(self.model.named_parameters())}"
            loss, seed = float(self.step_loss), self.config.seed
            raise broken_step(self.global_step, loss, plan, seed, "no update was made", norms)
        if self.config.optim.clip:
            torch.nn.utils.clip_grads_with_norm_(self._parameters_list, self.config.optim.clip, self.grad_norm)
        self.between_updates = False

    def on_train_start(self) -> None:
        self.between_updates = True

    def on_train_batch_end(self, outputs, batch, batch_idx: int) -> None:
        self.between_updates = True  # Lightning calls this after all callbacks are done with the step

    def require_finite_weights(self) -> None:
        """Raise `NonFiniteError` rather than let broken weights be saved over good ones."""
        if self.late_guard is not None:
            self.late_guard.settle()
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
