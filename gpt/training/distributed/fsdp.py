"""Weights, gradients and optimizer state split among the devices: `trainer.strategy=fsdp`, by PyTorch's FSDP2.

A rank keeps one part of every tensor, and gathers a block's weights for as long as that block computes: Rajbhandari et
al. 2020, "ZeRO" (arXiv:1910.02054), stage 3; Zhao et al. 2023, "PyTorch FSDP" (arXiv:2304.11277). Validation and
sampling use a plain model, gathered once, so that each rank may run it alone. Checkpoints are the same whole files as
without sharding.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from gpt.hardware.device import DTYPES
from gpt.model.transformer import GPT
from gpt.training.module import GPTModule


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

    def __init__(self, world_size: int):
        super().__init__(data_parallel_size=world_size, tensor_parallel_size=1, save_distributed_checkpoint=False)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return False  # callbacks use their state in `on_fit_start`, which comes before

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return self._gather(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._gather(ParallelStrategy.optimizer_state(self, optimizer))

    def load_checkpoint(self, checkpoint_path, weights_only: bool | None = None) -> dict[str, Any]:
        return ParallelStrategy.load_checkpoint(self, checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        present = self.lightning_module.state_dict()
        weights = {name: _split(weight, present[name]) for name, weight in checkpoint["state_dict"].items()}
        self.lightning_module.load_state_dict(weights)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        (optimizer,), (stored,) = self.optimizers, checkpoint["optimizer_states"]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        state = {
            i: {name: _split(value, parameters[i]) for name, value in values.items()}
            for i, values in stored["state"].items()
        }
        ParallelStrategy.load_optimizer_state_dict(self, {"optimizer_states": [stored | {"state": state}]})

    def _gather(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state with whole tensors on rank 0, which saves it, and with nothing in their place elsewhere."""

        def whole(part: DTensor) -> Tensor | None:
            gathered = part.full_tensor()
            return gathered.cpu() if self.is_global_zero else None

        return apply_to_collection(state, DTensor, whole)


def _split(whole: Tensor, like: DTensor) -> Tensor:
    """This rank's part of a tensor, split `like` another; one of another shape, such as a count, stays whole."""
    if whole.shape != like.shape:
        return whole
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
