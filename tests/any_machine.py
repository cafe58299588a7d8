"""Run commands as on a machine whose device lacks float64, without fcntl, torch.distributed and hard links.

`python tests/any_machine.py JSON` takes a list of command lines. Each begins with a script of this project or, as after
`python -m`, with a module. A line with `ENDED` follows the output of each.
"""

import json
import os
import runpy
import sys
import traceback
from importlib.abc import MetaPathFinder
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENDED = "ended with exit code"


class Lacking(MetaPathFinder):
    """Finds no torch.distributed, like conda-forge's PyTorch for Windows, and later no fcntl."""

    def find_spec(self, name, path=None, target=None):
        if name == "torch.distributed":
            for part in ("_c10d_init", "_distributed_c10d", "_rpc_init", "_distributed_autograd_init"):
                vars(sys.modules["torch._C"]).pop(part, None)
        if name.startswith("torch._C._distributed") or (name == "fcntl" and "lightning" in sys.modules):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


if __name__ == "__main__":
    sys.meta_path.insert(0, Lacking())

import filelock  # noqa: E402, F401 - libraries may use what Linux has
import lightning  # noqa: E402
import torch  # noqa: E402
import torch.utils.tensorboard  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402


def no_hard_links(*names, **kwargs) -> None:
    raise OSError(1, "Incorrect function")


# --- the device ---

DEVICE = torch.device("meta")  # tensors on "mps" appear on this device: PyTorch has it everywhere
MOVES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


class OnDevice(torch.Tensor):
    """A tensor on the device. No operation accepts it together with a tensor on the CPU."""

    @staticmethod
    def __new__(cls, cpu_value: torch.Tensor):
        kinds = {"dtype": cpu_value.dtype, "device": DEVICE, "requires_grad": cpu_value.requires_grad}
        return cls._make_wrapper_subclass(cls, cpu_value.shape, cpu_value.stride(), cpu_value.storage_offset(), **kinds)

    def __init__(self, cpu_value: torch.Tensor):
        self.cpu_value = cpu_value

    def tolist(self):
        return self.cpu_value.tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} outside of the device's mode")


def cpu_value(value):
    """Return the CPU tensor behind a tensor on the device. Return other values unchanged."""
    return value.cpu_value if isinstance(value, OnDevice) else value


class Device(TorchDispatchMode):
    """Computes on the CPU for a device without float64, like Apple's."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        there = [tensor for tensor in tensors if isinstance(tensor, OnDevice)]
        is_there = isinstance(tensors[0], OnDevice) if func is MOVES[0] else bool(there)
        if kwargs.get("device") is not None:
            is_there = torch.device(kwargs["device"]).type in (DEVICE.type, "mps")
            kwargs["device"] = torch.device("cpu")
        if there and func not in MOVES and any(t.dim() for t in tensors if not isinstance(t, OnDevice)):
            raise RuntimeError(f"{func}: expected all tensors to be on the same device")
        result = func(*tree_map(cpu_value, args), **tree_map(cpu_value, kwargs))
        known = {id(tensor.cpu_value): tensor for tensor in there}
        return tree_map(lambda value: self.wrapped(func, value, known), result) if is_there else result

    def wrapped(self, func, value, known: dict[int, OnDevice]):
        if not isinstance(value, torch.Tensor):
            return value
        if value.dtype in (torch.float64, torch.complex128):
            raise TypeError(f"{func}: the device does not support float64")
        return known[id(value)] if id(value) in known else OnDevice(value)


class Generator(torch.Generator):
    """A generator of the device."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls, "cpu")


def attach_device() -> None:
    """Let `auto` find an Apple device. Its tensors are `OnDevice`."""
    torch.backends.mps.is_available = lambda: True
    lightning.fabric.accelerators.MPSAccelerator.is_available = staticmethod(lambda: True)
    lightning.fabric.fabric._has_meta_device_parameters_or_buffers = lambda *args: False  # for Fabric
    for name, answer in (("recommended_max_memory", 2**33), ("driver_allocated_memory", 0), ("empty_cache", None)):
        setattr(torch.mps, name, lambda answer=answer: answer)
    torch.Generator = Generator
    torch.inference_mode = torch.no_grad  # inference mode cannot create `OnDevice` tensors
    torch.__future__.set_swap_module_params_on_conversion(True)  # parameters stay the same objects
    tensor, move, save = torch.tensor, torch.Tensor.to, torch.save
    first = torch.device("mps", 0)
    number = {"mps": first, torch.device("mps"): first}  # without its number, PyTorch would ask Apple's library
    torch.Tensor.to = lambda self, *args, **kwargs: move(self, *(number.get(a, a) for a in args), **kwargs)
    torch.tensor = lambda data, device=None, **kwargs: tensor(data, **kwargs).to(device or "cpu")
    torch.save = lambda payload, stream: save(tree_map(cpu_value, payload), stream)


def main() -> None:
    sys.modules.pop("fcntl", None)
    os.link = no_hard_links
    attach_device()
    for script, *arguments in json.loads(sys.argv[1]):
        sys.argv = [script, *arguments]
        code = 0
        try:
            with Device():
                if sys.argv[0].endswith(".py"):
                    runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
                else:
                    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code or 0
        except Exception:
            traceback.print_exc()
            code = 1
        print(f"{script} {ENDED} {code}", flush=True)


if __name__ == "__main__":
    main()
