"""What the machine offers: GPU names, memory limits of containers, errors, and the choices that follow from them."""

import sys
from pathlib import Path

import pytest
import torch

from gpt.errors import UserError, is_out_of_memory
from gpt.hardware import memory
from gpt.hardware.device import choose_compile, choose_device, choose_precision, device_count, peak_flops, require_torch
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
def test_too_old_torch(monkeypatch, version):
    """One line with the version found and the least."""
    monkeypatch.setattr(torch, "__version__", version)
    require_torch.cache_clear()
    expected = f"PyTorch {version} is too old: take 2.11 or newer (pip install --upgrade torch)"
    assert refusal(choose_device) == expected


@pytest.mark.parametrize(
    ("version", "told"), [("2.11.0", ""), ("2.15.3+cu132", ""), ("2.16.0a0+git1", "2.15"), ("3.0.0", "2.15")]
)
def test_newer_torch(monkeypatch, capsys, version, told):
    """It runs, and says once which was the last that was tried."""
    monkeypatch.setattr(torch, "__version__", version)
    require_torch.cache_clear()
    for _ in range(2):
        assert choose_device("cpu") == CPU
    line = f"PyTorch {version} is newer than {told}, the last that was tried\n"
    assert capsys.readouterr().err == (line if told else "")


def test_named_device(monkeypatch):
    """A name means that device, even where `auto` would take another; one that is missing or unknown is refused."""
    pretend(monkeypatch, cuda=True, mps=True)
    assert [choose_device(name) for name in ("cpu", "cuda", "mps")] == [CPU, CUDA, MPS]
    pretend(monkeypatch)
    for name in ("cuda", "mps", "", "gpu", "CPU", "cuda:7"):
        assert refusal(choose_device, name) == f"device '{name}' is not on this machine: choose from auto, cpu"


def test_device_count(monkeypatch):
    """As many GPUs as CUDA finds, one of Apple's, and no limit for a CPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 7)
    assert [device_count(device) for device in (CUDA, MPS, CPU)] == [7, 1, None]


# --- precision and compilation ---


def test_explicit_choices_are_honoured(monkeypatch):
    """Only `auto` looks at the machine, but a CPU compiles nothing."""
    monkeypatch.setattr("shutil.which", lambda name: name)
    for device in (CPU, CUDA, MPS):
        assert [choose_precision(name, device) for name in ("fp32", "bf16")] == ["fp32", "bf16"]
    assert [choose_compile(name, CUDA) for name in ("true", "false")] == [True, False]
    assert "trainer.compile=true is for GPUs" in refusal(choose_compile, "true", CPU)


@pytest.mark.parametrize("fast", [True, False])
def test_auto_precision(monkeypatch, fast):
    """`bf16` where CUDA has it in hardware, which emulation is not; else fp16 on CUDA; never on MPS."""
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
    """`bf16` where it is multiplied faster than fp32: with AMX, and in AMD's vectors but not in Intel's."""
    has = dict.fromkeys(flags, True) | ({"cpu_name": name} if name else {})
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    assert choose_precision("auto", CPU) == expected


@pytest.mark.parametrize("compiler", [None, "/usr/bin/cc"])
def test_auto_compile(monkeypatch, compiler):
    """Only on CUDA, and only with the C compiler that Triton needs."""
    monkeypatch.setattr("shutil.which", lambda name: compiler if name == "cc" else None)
    assert [choose_compile("auto", device) for device in (CUDA, CPU, MPS)] == [compiler is not None, False, False]


# --- peaks ---


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", None),  # no L4
        ("NVIDIA RTX A1000 Laptop GPU", None),  # no A100
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),  # a seventh of an A100
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("", None),
    ],
)
def test_peaks(monkeypatch, name, teraflops):
    """The names as CUDA spells them; a card that only resembles a known one has no peak, nor have other devices."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(CUDA, "bf16") == (teraflops and teraflops * 1e12)
    assert peak_flops(CUDA, "fp32") is peak_flops(CPU, "bf16") is peak_flops(MPS, "bf16") is None


# --- memory ---

GB = 10**9
UNLIMITED = 2**63 - 4096  # what cgroups v1 say where there is no limit


def machine(root: Path, available: int, groups: str) -> Path:
    """A file tree of a system with so much memory available, its process in these control groups."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 999999999 kB\nMemAvailable:   {available // 1000} kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    return root


def limit_v2(root: Path, group: str, limit: int | str, used: int, cached: int = 0) -> None:
    """A control group of version 2."""
    stat = f"anon {used - cached}\nactive_file 7\ninactive_file {cached}"
    write_group(root / "sys/fs/cgroup" / group, max=limit, current=used, stat=stat)


def limit_v1(root: Path, group: str, limit: int, used: int, cached: int = 0) -> None:
    """A control group of version 1, whose own figures do not hold its children's pages."""
    stat = f"inactive_file 0\ntotal_inactive_file {cached}"
    write_group(root / "sys/fs/cgroup/memory" / group, limit_in_bytes=limit, usage_in_bytes=used, stat=stat)


def write_group(folder: Path, **files: int | str) -> None:
    """Write the files of a control group."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"memory.{name}").write_text(f"{content}\n")


def test_memory_of_other_systems(tmp_path):
    """macOS and Windows have no /proc/meminfo: then 8 GB is the guess."""
    assert free_memory(CPU, tmp_path) == 8 * GB


def test_container_v2(tmp_path):
    """The limit less what is used, never less than nothing; pages of files not read lately are as good as free."""
    root = machine(tmp_path, 100 * GB, "0::/\n")
    assert free_memory(CPU, root) == 100_000_000 * 1024
    limit_v2(root, "", 7 * GB, 5 * GB)
    assert free_memory(CPU, root) == 2 * GB
    limit_v2(root, "", 7 * GB, 5 * GB, cached=3 * GB)
    assert free_memory(CPU, root) == 5 * GB
    limit_v2(root, "", 5 * GB, 7 * GB)
    assert free_memory(CPU, root) == 0


def test_slurm_job_v2(tmp_path):
    """The narrowest of the limits on the process's own group and all above it counts; "max" is none."""
    root = machine(tmp_path, 100 * GB, "0::/system.slice/job_11/step_0\n")
    limit_v2(root, "system.slice", "max", 50 * GB)
    limit_v2(root, "system.slice/job_11", 13 * GB, 2 * GB)
    limit_v2(root, "system.slice/job_11/step_0", "max", 2 * GB)
    assert free_memory(CPU, root) == 11 * GB
    limit_v2(root, "system.slice/job_11/step_0", 5 * GB, 2 * GB)
    assert free_memory(CPU, root) == 3 * GB
    limit_v2(root, "system.slice/job_13", GB, GB)  # somebody else's
    assert free_memory(CPU, root) == 3 * GB


def test_container_v1(tmp_path):
    """Version 1 has a folder of its own for memory, and a limit beyond all memory where there is none."""
    root = machine(tmp_path, 100 * GB, "9:name=systemd:/job\n5:cpu,memory:/job/step\n2:cpuset:/elsewhere\n0::/\n")
    for group in ("", "job", "job/step"):
        limit_v1(root, group, UNLIMITED, 2 * GB)
    assert free_memory(CPU, root) == 100_000_000 * 1024
    limit_v1(root, "job", 7 * GB, 3 * GB, cached=GB)
    assert free_memory(CPU, root) == 5 * GB


def test_container_v1_that_sees_its_path_on_the_host(tmp_path):
    """Docker mounts the container's own group as the root, and yet names the path that it has on the host."""
    root = machine(tmp_path, 100 * GB, "4:memory:/docker/0123abcd\n")
    limit_v1(root, "", 7 * GB, 2 * GB)
    assert free_memory(CPU, root) == 5 * GB


def test_memory_of_a_gpu(monkeypatch):
    """The GPU's own, of which CUDA reports what is free and all there is, and the most that its tensors took."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GB, 80 * GB))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7919)
    assert (free_memory(CUDA), peak_memory_bytes(CUDA)) == (3 * GB, 7919)


def test_memory_of_this_machine():
    """Both are plausible figures: the peak is at least what a large array has taken."""
    assert 1e6 < free_memory(CPU) < 1e14
    filled = b"7" * 50_000_000
    assert len(filled) < peak_memory_bytes(CPU) < 1e12


def test_windows(monkeypatch):
    """Windows has neither /proc nor `resource`: the peak is unknown there, and nothing breaks."""
    monkeypatch.setattr(memory, "read_proc_bytes", lambda *_: None)
    monkeypatch.setitem(sys.modules, "resource", None)
    assert peak_memory_bytes(CPU) == 0


def test_memory_of_apples_gpus(monkeypatch):
    """What Metal recommends at most, less what is taken; unused memory is given back."""
    released = []
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 7919)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 919)
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: released.append(True))
    assert free_memory(MPS) == 7000
    release_memory()
    assert not released
    pretend(monkeypatch, mps=True)
    release_memory()
    assert released


def test_memory_functions_without_glibc(monkeypatch):
    """Keeping freed memory and giving it back may be called at any time; elsewhere than with glibc they do nothing."""
    keep_freed_memory()
    release_memory()
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    monkeypatch.setattr("ctypes.CDLL", lambda name: pytest.fail("called"))
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
    """Each device's own way to say it."""
    assert is_out_of_memory(error)


def test_out_of_memory_for_real():
    """What this machine's CPU says when asked for a petabyte."""
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
    """Nothing else counts, whatever it speaks of."""
    assert not is_out_of_memory(error)
