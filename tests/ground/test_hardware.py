"""GPU names, memory limits of containers, out-of-memory errors, and the choices that follow from them."""

import re
from pathlib import Path

import pytest
import torch

from gpt.errors import UserError, is_out_of_memory
from gpt.hardware.device import choose_compile, choose_device, choose_precision, peak_flops, require_torch
from gpt.hardware.memory import free_memory, keep_freed_memory, peak_memory_bytes, release_memory
from harness import refusal

CPU, CUDA, MPS = (torch.device(name) for name in ("cpu", "cuda", "mps"))


# --- the device ---


def pretend(monkeypatch, cuda: bool = False, mps: bool = False) -> None:
    """Let PyTorch find these devices."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)


@pytest.mark.parametrize(
    ("cuda", "mps", "expected"),
    [(False, False, "cpu"), (False, True, "mps"), (True, False, "cuda"), (True, True, "cuda")],
)
def test_auto_takes_the_best_device(monkeypatch, cuda, mps, expected):
    """CUDA, else MPS, else the CPU."""
    pretend(monkeypatch, cuda, mps)
    assert choose_device("auto") == choose_device() == torch.device(expected)


@pytest.mark.parametrize("version", ["2.10.1", "1.13.1+cu117"])
def test_an_old_torch_is_refused(monkeypatch, version):
    """The line names both versions."""
    monkeypatch.setattr(torch, "__version__", version)
    require_torch.cache_clear()
    assert re.search(rf"{re.escape(version)} .* 2\.11 or newer", refusal(choose_device))


@pytest.mark.parametrize(
    ("version", "is_named"), [("2.11.0", False), ("2.15.3+cu132", False), ("2.16.0a0+git1", True), ("3.0.0", True)]
)
def test_a_newer_torch_is_named_once(monkeypatch, capsys, version, is_named):
    monkeypatch.setattr(torch, "__version__", version)
    require_torch.cache_clear()
    for _ in range(2):
        assert choose_device("cpu") == CPU
    assert capsys.readouterr().err.count(f"PyTorch {version} is newer than 2.15") == is_named


def test_named_device(monkeypatch):
    """A name overrides `auto`. A missing or unknown device is refused."""
    pretend(monkeypatch, cuda=True, mps=True)
    assert [choose_device(name) for name in ("cpu", "cuda", "mps")] == [CPU, CUDA, MPS]
    pretend(monkeypatch)
    for name in ("cuda", "mps", "", "gpu", "CPU", "cuda:7"):
        assert refusal(choose_device, name) == f"device '{name}' is not on this machine: choose from auto, cpu"


# --- precision and compilation ---


def test_a_cpu_does_not_compile():
    assert "trainer.compile=true is for GPUs" in refusal(choose_compile, "true", CPU)


@pytest.mark.parametrize("fast", [True, False])
def test_auto_precision(monkeypatch, fast):
    """CUDA with bf16 in hardware, not emulated, gets bf16. Other CUDA cards get fp16, and MPS fp32."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: fast or including_emulation)
    expected = ["bf16", "fp32"] if fast else ["fp16", "fp32"]
    assert [choose_precision("auto", device) for device in (CUDA, MPS)] == expected


@pytest.mark.parametrize(
    ("name", "flags", "expected"),
    [
        ("Intel Xeon", ["avx512_bf16", "amx_bf16"], "bf16"),
        ("Intel Xeon", ["avx512_bf16"], "fp32"),
        ("AMD EPYC", ["avx512_bf16"], "bf16"),
        ("AMD EPYC", ["avx2"], "fp32"),
        (None, ["neon", "bf16"], "fp32"),
    ],
)
def test_auto_precision_of_a_cpu(monkeypatch, name, flags, expected):
    """The precision is bf16 if the CPU multiplies it faster: with AMX, and with AMD's vectors but not Intel's."""
    has = dict.fromkeys(flags, True) | ({"cpu_name": name} if name else {})
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    assert choose_precision("auto", CPU) == expected


# --- peaks ---


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", None),  # not an L4
        ("NVIDIA RTX A1000 Laptop GPU", None),  # not an A100
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),  # a seventh of an A100
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("", None),
    ],
)
def test_peaks(monkeypatch, name, teraflops):
    """A card that only resembles a known card has no peak, and other devices have none."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(CUDA, "bf16") == (teraflops and teraflops * 1e12)
    assert peak_flops(CUDA, "fp32") is peak_flops(CPU, "bf16") is peak_flops(MPS, "bf16") is None


# --- memory ---

GB = 10**9
UNLIMITED = 2**63 - 4096  # the limit of cgroups v1 if there is none


def machine(root: Path, available: int, groups: str) -> Path:
    """Write the /proc of a system with this many bytes available, and its process in these control groups."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 999999999 kB\nMemAvailable:   {available // 1000} kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    return root


def limit_v2(root: Path, group: str, limit: int | str, used: int, cached: int = 0) -> None:
    """Write a control group of version 2."""
    stat = f"anon {used - cached}\nactive_file 7\ninactive_file {cached}"
    write_group(root / "sys/fs/cgroup" / group, max=limit, current=used, stat=stat)


def limit_v1(root: Path, group: str, limit: int, used: int, cached: int = 0) -> None:
    """Write a control group of version 1. Its own figures exclude the pages of its children."""
    stat = f"inactive_file 0\ntotal_inactive_file {cached}"
    write_group(root / "sys/fs/cgroup/memory" / group, limit_in_bytes=limit, usage_in_bytes=used, stat=stat)


def write_group(folder: Path, **files: int | str) -> None:
    """Write the files of a control group."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"memory.{name}").write_text(f"{content}\n")


def test_memory_of_other_systems(tmp_path):
    """macOS and Windows have no /proc/meminfo. They are assumed to have 8 GB."""
    assert free_memory(CPU, tmp_path) == 8 * GB


def test_container_v2(tmp_path):
    """The free memory is the limit less the used memory, and never negative. Inactive pages of files are free."""
    root = machine(tmp_path, 100 * GB, "0::/\n")
    assert free_memory(CPU, root) == 100_000_000 * 1024
    limit_v2(root, "", 7 * GB, 5 * GB)
    assert free_memory(CPU, root) == 2 * GB
    limit_v2(root, "", 7 * GB, 5 * GB, cached=3 * GB)
    assert free_memory(CPU, root) == 5 * GB
    limit_v2(root, "", 5 * GB, 7 * GB)
    assert free_memory(CPU, root) == 0


def test_slurm_job_v2(tmp_path):
    """The lowest limit of the process's group and its parents counts. "max" is no limit."""
    root = machine(tmp_path, 100 * GB, "0::/system.slice/job_11/step_0\n")
    limit_v2(root, "system.slice", "max", 50 * GB)
    limit_v2(root, "system.slice/job_11", 13 * GB, 2 * GB)
    limit_v2(root, "system.slice/job_11/step_0", "max", 2 * GB)
    assert free_memory(CPU, root) == 11 * GB
    limit_v2(root, "system.slice/job_11/step_0", 5 * GB, 2 * GB)
    assert free_memory(CPU, root) == 3 * GB
    limit_v2(root, "system.slice/job_13", GB, GB)  # another job's
    assert free_memory(CPU, root) == 3 * GB


def test_container_v1(tmp_path):
    """Version 1 has a separate folder for memory. Without a limit, its limit exceeds all memory."""
    root = machine(tmp_path, 100 * GB, "9:name=systemd:/job\n5:cpu,memory:/job/step\n2:cpuset:/elsewhere\n0::/\n")
    for group in ("", "job", "job/step"):
        limit_v1(root, group, UNLIMITED, 2 * GB)
    assert free_memory(CPU, root) == 100_000_000 * 1024
    limit_v1(root, "job", 7 * GB, 3 * GB, cached=GB)
    assert free_memory(CPU, root) == 5 * GB


def test_container_v1_that_sees_its_path_on_the_host(tmp_path):
    """Docker mounts the container's group as the root, but names its path on the host."""
    root = machine(tmp_path, 100 * GB, "4:memory:/docker/0123abcd\n")
    limit_v1(root, "", 7 * GB, 2 * GB)
    assert free_memory(CPU, root) == 5 * GB


def test_memory_of_this_machine():
    """Both values are plausible: the peak is at least the size of a large array."""
    assert 1e6 < free_memory(CPU) < 1e14
    filled = b"7" * 50_000_000
    assert len(filled) < peak_memory_bytes(CPU) < 1e12


def test_memory_is_released_and_kept():
    """Both may be called at any time."""
    keep_freed_memory()
    release_memory()


# --- errors ---


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("Tried to allocate 20.00 GiB"),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.10 GiB"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("MPS backend out of memory (MPS allocated: 17.00 GB, other allocations: 1.00 GB, ..."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000000000 bytes."),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4000000000000000 bytes."),
    ],
    ids=lambda error: f"{type(error).__name__} {str(error)[:30]}",
)
def test_out_of_memory(error):
    """Each device has its own message."""
    assert is_out_of_memory(error)


def test_out_of_memory_for_real():
    """A petabyte does not fit into this machine."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 5x7)"),
        UserError("data.path='CUDA out of memory.txt' is not there"),
    ],
    ids=lambda error: f"{type(error).__name__} {str(error)[:30]}",
)
def test_other_errors(error):
    """No other error counts, whatever words it contains."""
    assert not is_out_of_memory(error)
