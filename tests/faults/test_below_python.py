"""Errors of the disk, injected below Python, as of a lost NFS server, a broken disk or a power cut."""

import errno
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from harness import SAMPLES, Process, differences, fork_server, tiny_arguments, train, wait_for_file
from processes import ForkServer

pytestmark = pytest.mark.slow
RUN = ["horizon=101steps", SAMPLES]


@pytest.fixture(scope="module")
def faults(tmp_path_factory) -> ForkServer:
    """The server of processes whose calls fail. It has loaded the compiled library."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not Path("/proc/self/fd").exists():
        pytest.skip("NOT TESTED: errors below Python need a C compiler and Linux's /proc")
    library = tmp_path_factory.mktemp("faults") / "faults.so"
    source = Path(__file__).with_name("below_python.c")
    subprocess.run([compiler, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", source, "-o", library, "-ldl"], check=True)
    return fork_server(LD_PRELOAD=str(library))


def fault(call: str, number: int, path: str, when: Path) -> dict[str, str]:
    """Return the variables with which a call fails."""
    return {"FAULT_CALL": call, "FAULT_ERRNO": str(number), "FAULT_PATH": path, "FAULT_WHEN": str(when)}


@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("fsync", errno.EIO),
        ("write", errno.ENOSPC),
        ("rename", errno.ESTALE),
    ],
    ids=lambda value: value if isinstance(value, str) else errno.errorcode[value],
)
def test_failed_save_ends_the_run_in_one_line(faults, settings, reference, tmp_path, call, number):
    """Earlier checkpoints are intact, and the run continues from the last of them."""
    run_dir, when = tmp_path / "run", tmp_path / "now"
    variables = fault(call, number, str(run_dir / "checkpoints"), when)
    process = Process([*settings, f"run_dir={run_dir}"], variables, server=faults)
    wait_for_file(run_dir / "checkpoints/previous.ckpt")
    when.touch()
    assert process.end() == 2, process.output
    lines = [line for line in process.output.splitlines() if "train.py:" in line]
    assert len(lines) == 1, process.output
    assert os.strerror(number) in lines[0] or "disk is full" in lines[0], lines[0]
    assert "Traceback" not in process.output
    train(f"resume={run_dir}")
    assert differences(run_dir, reference) == []


@pytest.mark.parametrize(
    ("file", "number"),
    [
        ("corpus.txt", errno.EIO),
        ("last.ckpt", errno.ESTALE),
        ("config.yaml", errno.EIO),
        ("dataset.json", errno.ESTALE),
    ],
    ids=lambda value: value if isinstance(value, str) else errno.errorcode[value],
)
def test_failed_read_is_one_line_or_an_older_checkpoint(faults, corpus_folder, reference, tmp_path, file, number):
    """The line has the file, and without the fault the run ends with the same bits."""
    run_dir = Path(shutil.copytree(reference, tmp_path / "run"))
    shutil.copytree(corpus_folder / "cache", tmp_path / "cache")
    shutil.copy(corpus_folder / "corpus.txt", tmp_path)
    when = tmp_path / "now"
    when.touch()
    if file == "corpus.txt":  # prepared text would do
        shutil.rmtree(tmp_path / "cache")
    command = None
    if file in ("corpus.txt", "dataset.json"):
        command = tiny_arguments(tmp_path, *RUN, f"run_dir={tmp_path / 'new'}")
    process = Process(command or [f"resume={run_dir}"], fault("read", number, f"/{file}", when), server=faults)
    code = process.end()
    assert "Traceback" not in process.output
    assert code in (0, 2)
    if code == 2:
        [line] = [line for line in process.output.splitlines() if line.startswith("train.py: ")]
        assert file.removesuffix(".json") in line
    when.unlink()
    train(*(command or [f"resume={run_dir}"]))
    assert not [d for d in differences(tmp_path / "new" if command else run_dir, reference) if "data" not in d]


def after_power_cut(shadow: Path, folder: Path, inode: int) -> None:
    """Make `folder` from what was synced of the folder with this inode. A file without synced content is empty."""
    folder.mkdir()
    listing = shadow / str(inode)
    for line in listing.read_text().splitlines() if listing.exists() else ():
        number, is_folder, name = line.split(" ", 2)
        if is_folder == "1":
            after_power_cut(shadow, folder / name, int(number))
        elif (content := shadow / number).exists():
            shutil.copyfile(content, folder / name)
        else:
            (folder / name).touch()


@pytest.mark.promise("runs.md#power cut")
@pytest.mark.parametrize("moment", ["preparing", "first checkpoint", "later"])
def test_power_cut_leaves_what_was_synced(faults, corpus_folder, reference, tmp_path, moment):
    """The run continues from that, or starts again, and ends with the same bits."""
    place, shadow = tmp_path / "place", tmp_path / "shadow"
    place.mkdir()
    shadow.mkdir()
    shutil.copy(corpus_folder / "corpus.txt", tmp_path)
    words = [*tiny_arguments(tmp_path, *RUN), f"data.cache={place / 'new/cache'}", f"run_dir={place / 'runs/run'}"]
    process = Process(words, {"SHADOW": str(shadow)}, server=faults)
    appears = {"preparing": "new/cache", "first checkpoint": "runs/run/checkpoints/last.ckpt"}
    wait_for_file(place / appears.get(moment, "runs/run/checkpoints/previous.ckpt"))
    if moment == "first checkpoint":  # its name appears a moment before its folder is synced
        wait_for_file(shadow / str((place / "runs/run/checkpoints").stat().st_ino), containing="last.ckpt")
    process.send(signal.SIGKILL)
    process.end()
    inode = place.stat().st_ino
    place.rename(tmp_path / "lost")
    after_power_cut(shadow, place, inode)
    run = place / "runs/run"
    assert moment == "preparing" or (run / "checkpoints/last.ckpt").stat().st_size > 0
    if (run / "config.yaml").exists():
        train(f"resume={run}")
    else:
        assert moment == "preparing"
        shutil.rmtree(run, ignore_errors=True)
        train(*words)
    assert not [d for d in differences(run, reference) if "data" not in d]
