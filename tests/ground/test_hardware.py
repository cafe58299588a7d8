"""GPU names, memory limits of containers, out-of-memory errors, and the choices that follow from them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpt.errors import UserError, is_out_of_memory
from gpt.hardware import device as device_module
from gpt.hardware.device import choose_compile, choose_device, choose_precision, peak_flops, require_torch
from gpt.hardware.gpu_problems import find_gpu_problem, find_triton_problem
from gpt.hardware.memory import free_memory, peak_memory_bytes
from harness import ROOT, refusal

CPU, CUDA, MPS = (torch.device(name) for name in ("cpu", "cuda", "mps"))


# --- the device ---


@pytest.mark.parametrize(
    ("available", "name", "expected"),
    [
        ((), "auto", "cpu"),
        (("mps",), "auto", "mps"),
        (("cuda", "mps"), "auto", "cuda"),
        (("cuda", "mps"), "cpu", "cpu"),
    ],
)
def test_auto_takes_the_best_device_and_a_name_overrides_it(monkeypatch, available, name, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in available)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in available)
    assert choose_device(name) == torch.device(expected)


def test_a_missing_device_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for name in ("mps", "", "CPU", "cuda:7"):
        assert refusal(choose_device, name) == f"device '{name}' is not on this machine: choose from auto, cuda, cpu"


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


# --- a GPU that PyTorch cannot use ---


@pytest.fixture
def driver(tmp_path) -> Path:
    """The root of a system with NVIDIA's driver."""
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.256.02")
    return tmp_path


@pytest.mark.parametrize(
    ("cuda", "remedy"),
    [(None, "install a PyTorch built for CUDA"), ("13.0", "update the driver until nvidia-smi shows")],
)
def test_a_driver_that_pytorch_cannot_use(monkeypatch, driver, cuda, remedy):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    problem = find_gpu_problem(driver)
    assert problem.startswith("this machine has NVIDIA's driver, but PyTorch ")
    assert remedy in problem


def test_a_mac_whose_gpu_pytorch_cannot_use(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    monkeypatch.setenv("PATH", "")
    for is_built, remedy in ((True, "update macOS to 14 or newer"), (False, "install a PyTorch built for MPS")):
        monkeypatch.setattr(torch.backends.mps, "is_built", lambda is_built=is_built: is_built)
        assert remedy in find_gpu_problem(tmp_path)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert find_gpu_problem(tmp_path) == ""


@pytest.mark.parametrize(("capability", "is_old"), [((6, 1), True), ((7, 5), False), ((12, 0), False)])
def test_a_card_older_than_pytorch(monkeypatch, capability, is_old):
    """PyTorch would fail at its first kernel. The line has the capability of the card, and the one it needs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90", "sm_120", "compute_120"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce GTX 1080 Ti")
    assert (
        re.search(r"1080 Ti has compute capability 6\.1, .* needs 7\.5", find_gpu_problem()) is not None or not is_old
    )
    assert (choose_device().type == "cpu") == is_old
    if is_old:
        assert "needs 7.5" in refusal(choose_device, "cuda")


def test_auto_says_why_it_uses_the_cpu(monkeypatch, capsys):
    """The line is printed once. A command that names the CPU looks for no GPU."""
    monkeypatch.setattr(device_module, "find_gpu_problem", lambda: "the card is in the drawer")
    assert choose_device("auto") == choose_device("auto") == CPU
    assert capsys.readouterr().err == "the card is in the drawer: the device is cpu\n"
    assert refusal(choose_device, "cuda").endswith("choose from auto, cpu; the card is in the drawer")

    def fail():
        raise AssertionError

    monkeypatch.setattr(device_module, "find_gpu_problem", fail)
    monkeypatch.setattr(torch.cuda, "is_available", fail)
    assert choose_device("cpu") == CPU


# --- precision and compilation ---


def test_a_cpu_does_not_compile():
    assert "trainer.compile=true is for GPUs" in refusal(choose_compile, "true", CPU)
    assert not choose_compile("auto", CPU)


def test_what_triton_needs(monkeypatch, tmp_path):
    """Each thing that is missing has its remedy. CC names a compiler that is not in PATH."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install triton" in find_triton_problem(CUDA, str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert "install gcc" in find_triton_problem(CUDA, str(tmp_path))
    monkeypatch.setenv("CC", "/opt/bin/icx")
    assert f"{tmp_path}/Python.h is missing: install python3-dev" in find_triton_problem(CUDA, str(tmp_path))
    (tmp_path / "Python.h").touch()
    assert find_triton_problem(CUDA, str(tmp_path)) == ""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    assert "needs compute capability 7.0, and this card has 6.1" in find_triton_problem(CUDA, str(tmp_path))


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="SKIPPED LOUDLY: PyTorch compiles for a CPU with g++")
@pytest.mark.parametrize(("compiler", "works"), [("g++", True), ("false", False)])
def test_compiling_is_tried(tmp_path, compiler, works):
    """A compiler that fails becomes a reason. A CPU stands for the GPU."""
    code = "import torch, gpt.hardware.gpu_problems as g; print(g.find_compile_problem(torch.device('cpu')))"
    environment = os.environ | {"CXX": compiler, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert (run.stdout == "\n") == works
    assert works or re.fullmatch(r"compiling failed \(.*\)\n", run.stdout)


def test_failed_compilation(monkeypatch, capsys):
    """Where compile=auto, the run does not compile, and a line has the reason. Where it is true, the run is refused."""
    monkeypatch.setattr(device_module, "find_triton_problem", lambda device: "")
    monkeypatch.setattr(device_module, "find_compile_problem", lambda device: "no room for gcc")
    assert not choose_compile("auto", CUDA)
    assert capsys.readouterr().err == "trainer.compile=false, which is slower: no room for gcc\n"
    assert refusal(choose_compile, "true", CUDA).startswith("trainer.compile=true: no room for gcc; ")
    assert not choose_compile("false", CUDA)


@pytest.mark.parametrize(("in_hardware", "expected"), [(True, "bf16"), (False, "fp16")])
def test_cuda_that_only_emulates_bf16_gets_fp16(monkeypatch, in_hardware, expected):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: in_hardware or including_emulation)
    assert choose_precision("auto", CUDA) == expected
    assert choose_precision("auto", MPS) == "fp32"


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
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA RTX 6000 Ada Generation", 364),
        ("NVIDIA GeForce RTX 5090", 209),
        ("NVIDIA RTX A1000", None),  # not an A100
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),  # a seventh of an A100
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


def machine(root: Path, groups: str) -> Path:
    """Write the /proc of a system with 100 GB available, and its process in these control groups."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 999999999 kB\nMemAvailable:   100000000 kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    return root


def write_group(folder: Path, limit: int | str, used: int, cached: int = 0) -> None:
    """Write a control group of version 2. The files of version 1 have other names."""
    is_version_1 = "memory" in folder.parts
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ("memory.limit_in_bytes" if is_version_1 else "memory.max")).write_text(f"{limit}\n")
    (folder / ("memory.usage_in_bytes" if is_version_1 else "memory.current")).write_text(f"{used}\n")
    key = "inactive_file 0\ntotal_inactive_file" if is_version_1 else "active_file 7\ninactive_file"
    (folder / "memory.stat").write_text(f"anon 7\n{key} {cached}\n")


def test_memory_that_pytorch_caches_is_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GB, 80 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 7 * GB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5 * GB)
    assert free_memory(CUDA) == 5 * GB


def test_memory_of_other_systems(tmp_path):
    """macOS and Windows have no /proc/meminfo. They are assumed to have 8 GB."""
    assert free_memory(CPU, tmp_path) == 8 * GB


def test_memory_in_control_groups(tmp_path):
    """The lowest limit less the used memory is free, never less than 0. Inactive pages of files are free.

    The groups of the process and its parents count. "max" is no limit.
    """
    root = machine(tmp_path, "0::/system.slice/job_11/step_0\n")
    top = root / "sys/fs/cgroup"
    assert free_memory(CPU, root) == 100_000_000 * 1024
    write_group(top / "system.slice", "max", 50 * GB)
    write_group(top / "system.slice/job_11", 13 * GB, 2 * GB)
    write_group(top / "system.slice/job_11/step_0", "max", 2 * GB)
    write_group(top / "system.slice/job_13", GB, GB)  # another job's
    assert free_memory(CPU, root) == 11 * GB
    write_group(top / "system.slice/job_11/step_0", 5 * GB, 4 * GB, cached=2 * GB)
    assert free_memory(CPU, root) == 3 * GB
    write_group(top, 5 * GB, 7 * GB)  # a container's own group
    assert free_memory(CPU, root) == 0


def test_memory_in_control_groups_of_version_1(tmp_path):
    """They have a separate folder for memory. Without a limit, their limit exceeds all memory.

    Docker mounts the container's group as the root, but names its path on the host.
    """
    root = machine(tmp_path, "9:name=systemd:/job\n5:cpu,memory:/docker/0123abcd\n2:cpuset:/elsewhere\n0::/\n")
    top = root / "sys/fs/cgroup/memory"
    write_group(top, 2**63 - 4096, 2 * GB)
    assert free_memory(CPU, root) == 100_000_000 * 1024
    write_group(top, 7 * GB, 3 * GB, cached=GB)
    assert free_memory(CPU, root) == 5 * GB
    write_group(top / "docker", 4 * GB, 3 * GB)
    assert free_memory(CPU, root) == GB


def test_memory_of_this_machine():
    """Both values are plausible: the peak is at least the size of a large array."""
    assert 1e6 < free_memory(CPU) < 1e14
    filled = b"7" * 50_000_000
    assert len(filled) < peak_memory_bytes(CPU) < 1e12


# --- errors ---


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("Tried to allocate 20.00 GiB"), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), False),
        (RuntimeError("MPS backend out of memory (MPS allocated: 17.00 GB, other allocations: 1.00 GB"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 40000 bytes."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"), False),
        (UserError("data.path='CUDA out of memory.txt' is not there"), False),
    ],
    ids=str,
)
def test_out_of_memory(error, expected):
    """Each device has its own message. No other error counts, whatever words it contains."""
    assert is_out_of_memory(error) == expected


def test_out_of_memory_for_real():
    """A petabyte does not fit into this machine."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert is_out_of_memory(caught.value)
