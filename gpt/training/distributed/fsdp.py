"""Weights, gradients and optimizer state split among the devices: `trainer.strategy=fsdp`, by PyTorch's FSDP2.

A rank keeps one part of every tensor, and gathers a block's weights for as long as that block computes: Rajbhandari et
al. 2020, "ZeRO" (arXiv:1910.02054), stage 3; Zhao et al. 2023, "PyTorch FSDP" (arXiv:2304.11277). Validation and
sampling use a plain model, gathered once, so that each rank may run it alone. Checkpoints are the same whole files as
without sharding.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from gpt.hardware.device import DTYPES
from gpt.model.transformer import GPT
from gpt.training.module import GPTModule

STORED = ("state_dict", "optimizer_states")  # what a checkpoint holds of the split tensors


class ShardedModule(GPTModule):
    """A `GPTModule` whose model is split among the ranks."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        mesh, device = self.device_mesh["data_parallel"], self.trainer.strategy.root_device
        for parameter in self.model.parameters():  # rank 0 alone may have been given weights to start from
            whole = parameter.detach().to(device)
            torch.distributed.broadcast(whole, 0)
            parameter.detach().copy_(whole)
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh, reshard_after_forward=False)  # the loss uses the head's weight afterwards
        register_fsdp_forward_method(self.model, "hidden_and_head")
        # The view is the head's weight, which nothing changes in place.
        warnings.filterwarnings("ignore", ".*returned a view tensor", UserWarning)
        self._parameters_list = list(self.model.parameters())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put whole tensors in the place of this rank's parts on rank 0, which saves them, and nothing elsewhere."""

        def whole(part: DTensor) -> Tensor | None:
            gathered = part.full_tensor()
            return gathered.cpu() if self.trainer.is_global_zero else None

        checkpoint |= {key: apply_to_collection(checkpoint[key], DTensor, whole) for key in STORED}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put this rank's parts in the place of whole tensors; counts, which have no rows, stay whole."""
        like = next(self.model.parameters())
        assert isinstance(like, DTensor)

        def part(whole: Tensor) -> Tensor:
            if whole.dim() == 0:
                return whole
            return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)

        checkpoint |= {key: apply_to_collection(checkpoint[key], Tensor, part) for key in STORED}

    def measure_gradients(self) -> Tensor:
        norm = super().measure_gradients()
        assert isinstance(norm, DTensor)
        return norm.full_tensor()

    def require_finite_weights(self) -> None:
        with self.whole_weights():  # of its part, each rank would judge alone
            super().require_finite_weights()

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        split = self.model
        assert isinstance(split, GPT)
        weights = {name: weight.full_tensor() for name, weight in split.state_dict().items()}
        self.model = GPT.from_state_dict(split.config, weights).to(self.device)
        self.model.compute_in(DTYPES[self.config.trainer.precision])
        try:
            yield
        finally:
            self.model = split


class Sharding(ModelParallelStrategy):
    """Lightning's strategy for FSDP2, with checkpoints as all other strategies read and write them."""

    lightning_module_state_dict = ParallelStrategy.lightning_module_state_dict
    optimizer_state = ParallelStrategy.optimizer_state
    load_checkpoint = ParallelStrategy.load_checkpoint
    load_model_state_dict = ParallelStrategy.load_model_state_dict
    load_optimizer_state_dict = ParallelStrategy.load_optimizer_state_dict
    lightning_restore_optimizer = ParallelStrategy.lightning_restore_optimizer
    # Callbacks use their state in `on_fit_start`, which comes before the end of the setup.
    restore_checkpoint_after_setup = ParallelStrategy.restore_checkpoint_after_setup
