"""GPT as a LightningModule: the loss of a micro-batch, the optimizer, and checks for numbers that are not finite.

The loop in loop.py and a plain `lightning.Trainer` train it to the same weights.
"""

import math
from collections import defaultdict
from dataclasses import asdict

import torch
from lightning import LightningModule
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from gpt.checkpoint import is_finite
from gpt.data.bpe_dropout import apply_bpe_dropout, merge_table
from gpt.data.tokenizer import Tokenizer
from gpt.errors import NonFiniteError, UserError
from gpt.hardware.device import DTYPES, choose_precision
from gpt.model.fast.chunked_loss import chunked_next_token_loss
from gpt.model.loss import IGNORE_INDEX
from gpt.model.transformer import GPT, GPTConfig
from gpt.training.config import Config
from gpt.training.loss_scale import LossScale
from gpt.training.optim import build_optimizer
from gpt.training.schedule import Schedule
from gpt.training.training_clock import TrainingClock

NON_FINITE_HINT = "the last checkpoint is intact: start a new run from it with init_from= and a lower learning rate"


class GPTModule(LightningModule):
    """A GPT for Lightning. It has the state dict of `GPT`, so the names in checkpoints have no prefix.

    Args:
        config: The final configuration of a run.
        tokenizer: Determines the vocabulary, and the merges that BPE-dropout undoes.
        schedule: The planned schedule.
        clock: The training clock, needed if the horizon is a time.
    """

    merge_table: Tensor  # (V, 2): see bpe_dropout.py

    def __init__(self, config: Config, tokenizer: Tokenizer, schedule: Schedule, clock: TrainingClock | None = None):
        super().__init__()
        self.config = config
        self.schedule = schedule
        self.clock = clock
        torch.manual_seed(config.seed)
        self.model = GPT(GPTConfig(vocab_size=tokenizer.vocab_size, **asdict(config.model)))
        if config.data.bpe_dropout:
            self.register_buffer("merge_table", merge_table(tokenizer), persistent=False)
        self.model.set_compute_dtype(DTYPES.get(config.trainer.precision, torch.float32))
        self.loss_scale = LossScale(config.trainer.device) if config.trainer.precision == "fp16" else None
        self.model.checkpointing = config.trainer.activation_checkpointing
        if config.trainer.compile == "true":
            self.model.compile_blocks()
        self._weights = list(self.model.parameters())  # collecting them takes a third of the time for their norm
        self.grad_norm = torch.zeros(())  # of the last step, before clipping
        self.sequence_length = config.model.context_length  # of the last micro-batch
        # Reading a norm makes the host wait for the GPU, so without loss scaling only points of the curves read it.
        self.checks_each_step = config.trainer.device != "cuda" or self.loss_scale is not None

    # --- one micro-batch ---

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss of a micro-batch in nats per token, a scalar.

        Args:
            batch: Inputs and targets, each (B, T).
            batch_idx: The number of this rank's micro-batch, counted over all steps. It seeds dropout and BPE-dropout,
                so there is no generator state to save.
        """
        idx, targets = batch
        self.sequence_length = idx.shape[1]
        seed = hash((self.config.seed, batch_idx, self._rank))
        if probability := self._bpe_dropout(batch_idx // self.config.accumulation_steps):
            generator = torch.Generator(idx.device).manual_seed(seed)
            idx, targets = apply_bpe_dropout(idx, targets, self.merge_table, probability, generator)
        if self.config.model.dropout and idx.is_cpu:
            torch.default_generator.manual_seed(seed)
        elif self.config.model.dropout:
            torch.manual_seed(seed)  # without a GPU it takes 0.3 ms, because it would seed a GPU that comes later
        return self.loss(idx, targets)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the mean loss of inputs and targets, each (B, T). Only a `Trainer` calls it: see validation.py."""
        idx, targets = batch
        loss = self.loss(idx, targets)
        self.log("val/loss", loss, batch_size=int((targets != IGNORE_INDEX).sum()), sync_dist=True)

    def loss(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of inputs and targets, each (B, T), in nats per token."""
        scale = self.loss_scale.value_on(idx.device) if self.loss_scale else 1.0
        num_offsets = self.config.model.context_length // idx.shape[1]
        hidden, head_weight = self.model.features_and_head(idx, num_offsets)
        return chunked_next_token_loss(hidden, head_weight, targets, scale, self.model.is_compiled)

    @property
    def _rank(self) -> int:
        return self.fabric.global_rank if self.fabric is not None else self.global_rank

    def _bpe_dropout(self, step: int) -> float:
        """Return the probability of undoing a merge. It falls to 0 at the horizon."""
        progress = self.schedule.progress(step, self.clock.progress if self.clock else 0.0)
        return (self.config.data.bpe_dropout or 0.0) * (1.0 - progress)

    # --- the optimizer ---

    def build_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer for the weights on their present device."""
        # bfloat16 is accurate enough for the directions of Muon. It is used if it is fast. In fp16 most would be zero.
        precision = self.config.trainer.precision
        device = torch.device(self.config.trainer.device)
        muon_dtype = torch.bfloat16 if "bf16" in (precision, choose_precision("auto", device)) else torch.float32
        weights = dict(self.model.named_parameters())
        return build_optimizer(weights, self.config.model.num_heads, self.config.optim, muon_dtype)

    def configure_optimizers(self):
        """Return the optimizer and its learning-rate schedule for a `Trainer`."""
        if self.loss_scale is not None or self.schedule.seconds:
            raise UserError(
                f"lightning.Trainer trains neither trainer.precision=fp16 nor horizon={self.config.horizon} of this "
                "module: use fp32 or bf16, and a horizon in steps, tokens or epochs"
            )
        optimizer = self.build_optimizer()
        scheduler = LambdaLR(optimizer, lambda step: self.schedule.lr_multiplier(step, 0.0, self.config.optim))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None) -> None:
        """Clip the gradient. A `Trainer` calls this before each update."""
        if not math.isfinite(self.measure_grad_norm()):
            step = self.global_step
            raise self.non_finite_gradient(step, step + 1, torch.tensor(math.nan), "no update was made")
        self.clip_gradients_to(self.config.optim.clip)

    def measure_grad_norm(self) -> Tensor:
        """Return the norm of the whole gradient, a scalar, and store it in `grad_norm`."""
        self.grad_norm = torch.nn.utils.get_total_norm([p.grad for p in self._weights if p.grad is not None])
        return self.grad_norm

    def clip_gradients_to(self, max_norm: float) -> None:
        """Clip the gradient, whose norm is in `grad_norm`, to `max_norm`. With 0, do nothing."""
        if max_norm:
            torch.nn.utils.clip_grads_with_norm_(self._weights, max_norm, self.grad_norm)

    # --- numbers that are not finite ---

    def non_finite_gradient(self, last_finite_step: int, step: int, loss: Tensor, consequence: str) -> NonFiniteError:
        """Return the error for a gradient that is not finite.

        Args:
            last_finite_step: The last step whose gradient is known to be finite.
            step: The present step.
            loss: The loss of the present step, a scalar.
            consequence: The effect on the run, for the message.
        """
        steps = f"step {step}" if step == last_finite_step + 1 else f"steps {last_finite_step + 1} to {step}"
        return NonFiniteError(
            f"{steps}: the gradient is not finite, so {consequence} (loss {float(loss):.4g}); {NON_FINITE_HINT}\n"
            f"  gradient norms: {self._norms_by_layer()}" + (self.loss_scale.history if self.loss_scale else "")
        )

    def _norms_by_layer(self) -> str:
        squares: dict[str, float] = defaultdict(float)
        for name, p in self.model.named_parameters():
            if p.grad is not None:
                layer = ".".join(name.split(".")[: 2 if name.startswith("blocks.") else 1])
                squares[layer] += float(p.grad.float().square().sum())
        return ", ".join(f"{layer} {math.sqrt(square):.3g}" for layer, square in squares.items())

    def require_finite_weights(self, step: int) -> None:
        """Raise `NonFiniteError` if weights are not finite, so that they never replace good weights."""
        names = [name for name, p in self.model.named_parameters() if not is_finite(p)]
        if names:
            raise NonFiniteError(
                f"step {step}: the update has left weights that are not finite ({', '.join(names[:3])}), "
                f"so nothing was saved after it; {NON_FINITE_HINT}"
            )

    def state_dict(self, *args, **kwargs):
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict, *args, **kwargs):
        return self.model.load_state_dict(state_dict, *args, **kwargs)
