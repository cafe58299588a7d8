"""Runs commands as on a machine that is neither Linux nor has CUDA: what macOS or Windows lack fails as it does there.

`python tests/any_machine.py JSON` takes a list of command lines; each begins with a script of this project or, as after
`python -m`, with a module. A line with `ENDED` follows the output of each. What cannot be seen from here: operations
that PyTorch lacks on other systems, and how Windows behaves beyond what is taken away below.
"""

import builtins
import contextlib
import ctypes
import io
import json
import os
import platform
import re
import runpy
import shutil
import signal
import sys
import traceback
import warnings
from importlib.abc import MetaPathFinder
from pathlib import Path
from unittest import mock


class NoDistributed(MetaPathFinder):
    """Has PyTorch come up as where it was built without `torch.distributed`, such as conda-forge's for Windows."""

    def find_spec(self, name, path=None, target=None):
        if name == "torch.distributed":
            for part in ("_c10d_init", "_distributed_c10d", "_rpc_init", "_distributed_autograd_init"):
                vars(sys.modules["torch._C"]).pop(part, None)
        if name.startswith("torch._C._distributed"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


if __name__ == "__main__":
    sys.meta_path.insert(0, NoDistributed())

# Libraries know Linux when they are imported, and use what it has: only our own code must do without.
import filelock  # noqa: E402, F401
import hydra  # noqa: E402, F401
import lightning  # noqa: E402
import torch  # noqa: E402
import torch.utils.tensorboard  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
ENDED = "ended with exit code"
MODULES = {"fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"}
FUNCTIONS = re.findall(
    r"\w+",
    """
    chown chroot fchmod fchown fork forkpty getegid geteuid getgid getgroups getloadavg getpgid getpgrp getresuid getsid
    getuid killpg lchown major mkfifo mknod nice openpty posix_fadvise posix_spawn pread preadv pwrite sched_getaffinity
    sched_setaffinity sched_yield sendfile setpgid setsid setuid statvfs sync sysconf uname wait wait3 wait4
    """,
)
SIGNALS = {"SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM"}  # of Windows
SIGNAL_FUNCTIONS = ("alarm", "pause", "pthread_kill", "pthread_sigmask", "setitimer", "siginterrupt", "sigwait")
LINUX = {name: getattr(os, name) for name in ("fsync", "kill", "open", "rename", "replace", "unlink")}
OPEN = io.open


# --- the system ---


class Refuse(MetaPathFinder):
    """Finds no module that Windows lacks."""

    def find_spec(self, name, path=None, target=None):
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def in_use(path) -> bool:
    """Whether this process has a file open or mapped, or one below a folder: then Windows lets nobody move it."""
    place = os.path.realpath(path)
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    names = [os.readlink(link) for link in links if os.path.islink(link)]
    with OPEN("/proc/self/maps", encoding="utf-8") as maps:
        names += [line.split(maxsplit=5)[5].strip() for line in maps if "/" in line]
    return any(name == place or name.startswith(place + os.sep) for name in names)


def without_proc(file, *args, **kwargs):
    if isinstance(file, str | os.PathLike) and os.fspath(file).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "No such file or directory", str(file))
    return OPEN(file, *args, **kwargs)


def open_no_folder(path, *args, **kwargs):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", str(path))
    return LINUX["open"](path, *args, **kwargs)


def fsync_no_folder(descriptor) -> None:
    assert not os.path.isdir(f"/proc/self/fd/{descriptor}"), "Windows cannot sync a folder"
    LINUX["fsync"](descriptor)


def kill_itself(process: int, number: int) -> None:
    assert process == os.getpid(), "on Windows, os.kill ends another process whatever the signal"
    LINUX["kill"](process, number)


def moving(name: str):
    """os.rename or os.replace of Windows."""

    def move(source, target, **kwargs) -> None:
        if name == "rename" and os.path.lexists(target):
            raise FileExistsError(17, "File exists", str(source), None, str(target))
        if used := [path for path in (source, target) if in_use(path)]:
            raise PermissionError(13, "The process cannot access the file", str(used[0]))
        LINUX[name](source, target, **kwargs)

    return move


def unlink(path, **kwargs) -> None:
    if in_use(path) and sys._getframe(1).f_globals["__name__"] != "tempfile":
        raise PermissionError(13, "The process cannot access the file", str(path))
    LINUX["unlink"](path, **kwargs)


def no_links(*names, **kwargs) -> None:
    raise OSError(1, "Incorrect function")


class Library(ctypes.CDLL):
    """Any library but that of C, whose functions are other ones."""

    def __init__(self, name, *args, **kwargs):
        assert name is not None and "libc." not in str(name), "there is no such C library"
        super().__init__(name, *args, **kwargs)


def leave_linux() -> None:
    """Take away what other systems lack, for the rest of this process."""
    assert not torch.distributed.is_available()
    sys.meta_path.insert(0, Refuse())
    for name in MODULES:
        sys.modules.pop(name, None)
    for module, names in (
        (os, FUNCTIONS),
        (signal, [name for name in dir(signal) if re.match("SIG[A-Z]", name) and name not in SIGNALS]),
        (signal, SIGNAL_FUNCTIONS),
    ):
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    builtins.open = io.open = without_proc
    os.open, os.fsync, os.kill, os.link, os.symlink = open_no_folder, fsync_no_folder, kill_itself, no_links, no_links
    os.rename, os.replace = moving("rename"), moving("replace")
    os.unlink = os.remove = unlink
    shutil._use_fd_functions = shutil._USE_CP_SENDFILE = False
    shutil.which = lambda *args, **kwargs: None  # no compilers
    platform.libc_ver = lambda *args, **kwargs: ("", "")
    ctypes.CDLL = Library
    signal.valid_signals = lambda: {getattr(signal, name) for name in SIGNALS}
    warnings.filterwarnings("error", category=EncodingWarning, module=r"(gpt\.|__main__|train|generate)")


# --- the device ---

DEVICE = torch.device("meta")  # as what tensors on "mps" appear: a device that PyTorch has everywhere, without data
MOVES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


class OnDevice(torch.Tensor):
    """A tensor that says it is on the device, and that no operation takes together with one on the CPU."""

    @staticmethod
    def __new__(cls, held: torch.Tensor):
        kinds = {"dtype": held.dtype, "device": DEVICE, "requires_grad": held.requires_grad}
        return cls._make_wrapper_subclass(cls, held.shape, held.stride(), held.storage_offset(), **kinds)

    def __init__(self, held: torch.Tensor):
        self.held = held

    def tolist(self):
        return self.held.tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} outside of the device's mode")


def held(value):
    """What is on the device, on the CPU; anything else as it is."""
    return value.held if isinstance(value, OnDevice) else value


class Device(TorchDispatchMode):
    """Computes on the CPU for a device that, like Apple's, has no float64."""

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
        result = func(*tree_map(held, args), **tree_map(held, kwargs))
        known = {id(tensor.held): tensor for tensor in there}
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
    """Have `auto` find one of Apple's devices, whose tensors are `OnDevice`."""
    torch.backends.mps.is_available = lambda: True
    lightning.fabric.accelerators.MPSAccelerator.is_available = staticmethod(lambda: True)
    lightning.fabric.fabric._has_meta_device_parameters_or_buffers = lambda *args: False  # as Fabric would see them
    for name, answer in (("recommended_max_memory", 2**33), ("driver_allocated_memory", 0), ("empty_cache", None)):
        setattr(torch.mps, name, lambda answer=answer: answer)
    torch.Generator = Generator
    torch.inference_mode = torch.no_grad  # in which tensors of our own kind cannot be made
    torch.__future__.set_swap_module_params_on_conversion(True)  # parameters stay the same objects, as elsewhere
    tensor, move, save = torch.tensor, torch.Tensor.to, torch.save
    first = torch.device("mps", 0)
    number = {"mps": first, torch.device("mps"): first}  # without its number, PyTorch would ask Apple's library
    torch.Tensor.to = lambda self, *args, **kwargs: move(self, *(number.get(a, a) for a in args), **kwargs)
    torch.tensor = lambda data, device=None, **kwargs: tensor(data, **kwargs).to(device or "cpu")
    torch.save = lambda payload, stream: save(tree_map(held, payload), stream)


def main() -> None:
    leave_linux()
    attach_device()
    for script, *arguments in json.loads(sys.argv[1]):
        sys.argv, code = [script, *arguments], 0
        mutation = contextlib.nullcontext()
        if script == "mutated":  # the name of something, Python for what replaces it, and the command line
            mutation = mock.patch(arguments[0], eval(arguments[1]))
            _, _, *sys.argv = arguments
        try:
            with Device(), mutation:
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
