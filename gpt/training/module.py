"""The training step, as Lightning calls it: loss, gradient, and an update that is skipped if the gradient is broken."""

import math
from collections import defaultdict
from dataclasses import asdict

import torch
from lightning import LightningModule
from torch import Tensor

from gpt.errors import NonFiniteError
from gpt.exchange.assembly import is_finite
from gpt.hardware import DTYPES, choose_precision
from gpt.model.chunked_loss import chunked_next_token_loss
from gpt.model.transformer import GPT, GPTConfig
from gpt.text.shards import Corpora
from gpt.training.config import Config
from gpt.training.optim import build_optimizer, lr_factor, set_lr
from gpt.training.plan import Plan

REMEDY = "the last checkpoint is intact: start a new run from it with init_from= and lower rates"


class GPTModule(LightningModule):
    """A GPT and its training step. The state dict is the model's own, so that checkpoints have plain names."""

    def __init__(self, config: Config, plan: Plan, corpora: Corpora):
        super().__init__()
        self.config, self.plan, self.corpora = config, plan, corpora
        torch.manual_seed(config.seed)
        self.model = GPT(GPTConfig(vocab_size=corpora.tokenizer.vocab_size, **asdict(config.model)))
        self.model.compute_in(DTYPES.get(config.trainer.precision, torch.float32))
        self.model.checkpointing = config.trainer.activation_checkpointing
        if config.trainer.compile == "true":
            for block in self.model.blocks:  # in place, so that state dicts keep their names
                block.compile()
        self._parameters_list = list(self.model.parameters())  # collecting them takes a third as long as their norm
        self.step_loss = torch.zeros(())  # running mean over this step's micro-batches, on this rank
        self.grad_norm = torch.zeros(())  # of the last step, before clipping
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
        return chunked_next_token_loss(*self.model.hidden_and_head(idx), targets)

    def _micro_step(self, batch_idx: int) -> int:
        return self.global_step * self.plan.accumulation + batch_idx % self.plan.accumulation

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(dict(self.model.named_parameters()))

    def make_optimizer(self, weights: dict[str, Tensor]) -> torch.optim.Optimizer:
        """The configured optimizer for weights by name."""
        # Muon needs only the direction of its updates, so bfloat16 is enough wherever it is fast, in fp32 runs too.
        fast = choose_precision("auto", torch.device(self.config.trainer.device))
        return build_optimizer(weights, self.config.model.num_heads, self.config.optim, DTYPES[fast])

    def measure_gradients(self) -> Tensor:
        """The norm of the whole gradient, a scalar."""
        return torch.nn.utils.get_total_norm([p.grad for p in self._parameters_list if p.grad is not None])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        plan = self.plan
        factor = lr_factor(self.global_step, plan.total_steps, self.config.optim, plan.extended_at, plan.factor_then)
        set_lr(optimizer, factor)
        self.grad_norm = self.measure_gradients()
        if not math.isfinite(self.grad_norm):
            raise NonFiniteError(self._describe_step())
        if self.config.optim.clip:
            torch.nn.utils.clip_grads_with_norm_(self._parameters_list, self.config.optim.clip, self.grad_norm)
        self.between_updates = False

    def on_train_start(self) -> None:
        self.between_updates = True

    def on_train_batch_end(self, outputs, batch, batch_idx: int) -> None:
        self.between_updates = True  # Lightning calls this after all callbacks are done with the step

    def require_finite_weights(self) -> None:
        """Raise `NonFiniteError` rather than let broken weights be saved over good ones."""
        broken = [name for name, p in self.model.named_parameters() if not is_finite(p)]
        if broken:
            raise NonFiniteError(
                f"step {self.global_step}: the update has left weights that are not finite ({', '.join(broken[:3])}), "
                f"which are not saved; {REMEDY}"
            )

    def _describe_step(self) -> str:
        """What can be said about a step whose gradient is not finite: its loss, its windows, each layer's norm."""
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
            f"{REMEDY}\n  gradient norms: {norms}"
        )

    def state_dict(self, *args, **kwargs):
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict, *args, **kwargs):
        self.model.load_state_dict(state_dict, *args, **kwargs)
