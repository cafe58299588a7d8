"""Why a GPU of this machine cannot be used or compiled for: each function returns a reason with its remedy, or ""."""

import importlib.util
import os
import platform
import re
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

from gpt.errors import summarize_error


def find_gpu_problem(root: Path = Path("/")) -> str:
    """Return why PyTorch cannot use a GPU of this machine, or an empty string if it can, or if there is none.

    `root` holds /proc, where NVIDIA's driver shows its version.
    """
    if torch.cuda.is_available():
        return _find_old_card_problem()
    if (root / "proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi"):
        remedy = "install a PyTorch built for CUDA"
        if torch.version.cuda is not None:
            remedy = f"update the driver until nvidia-smi shows CUDA {torch.version.cuda} or newer"
        return f"this machine has NVIDIA's driver, but PyTorch {torch.__version__} cannot use it ({remedy})"
    if sys.platform == "darwin" and platform.machine() == "arm64" and not torch.backends.mps.is_available():
        remedy = "update macOS to 14 or newer" if torch.backends.mps.is_built() else "install a PyTorch built for MPS"
        return f"this machine has an Apple GPU, but PyTorch {torch.__version__} cannot use it ({remedy})"
    return ""


def _find_old_card_problem() -> str:
    """Return a problem if this PyTorch has no kernels for a card as old as the first one."""
    capabilities = [int(digits) for digits in re.findall(r"\bsm_(\d+)", " ".join(torch.cuda.get_arch_list()))]
    if not capabilities:
        return ""
    major, minor = torch.cuda.get_device_capability()
    oldest = min(capabilities)
    if 10 * major + minor >= oldest:
        return ""
    return (
        f"{torch.cuda.get_device_name()} has compute capability {major}.{minor}, and PyTorch {torch.__version__} needs "
        f"{oldest // 10}.{oldest % 10} (install a PyTorch built for an older CUDA)"
    )


def find_triton_problem(device: torch.device, include: str = sysconfig.get_paths()["include"]) -> str:
    """Return what Triton lacks to build kernels for a CUDA device, or an empty string.

    Triton takes the C compiler `$CC`, gcc or clang, and reads Python.h in the folder `include`.
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 7:
        return f"Triton needs compute capability 7.0, and this card has {major}.{minor}"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler: install gcc"
    if not Path(include, "Python.h").is_file():
        return f"Triton needs Python's headers, and {include}/Python.h is missing: install python3-dev"
    return ""


def find_compile_problem(device: torch.device) -> str:
    """Return the error of compiling a small function for a device, or an empty string if that works."""
    try:
        torch.compile(torch.expm1)(torch.ones(7, device=device))
    except Exception as error:  # of Triton, of a C compiler or of the system
        return f"compiling failed ({summarize_error(error)})"
    return ""
