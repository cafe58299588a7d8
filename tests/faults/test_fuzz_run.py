"""Random damage to the files of a run: the run continues with the same bits, or one line has the reason."""

import os
import random
import shutil
import time
from pathlib import Path

import pytest
import torch

from gpt.checkpoint import load_checkpoint
from harness import train

RUN = ["horizon=23steps", "trainer.validate_every=7", "trainer.checkpoint_every=5", "data.prompts=[]"]
STOP = 13
MUTATIONS = 80


def damage(file: Path, chance: random.Random) -> str:
    """Change a file at random, and return how."""
    content = bytearray(file.read_bytes())
    place = chance.randrange(len(content) + 1)
    how = chance.choice(["flip", "cut", "insert", "remove", "empty", "double", "delete", "folder"])
    if how == "flip" and content:
        content[place % len(content)] ^= 1 << chance.randrange(8)
    elif how == "cut":
        del content[place:]
    elif how == "insert":
        content[place:place] = chance.choice([b"\0", b"\xff\xfe", b"- {", b"${oc.env:HOME}", b": [", b"9" * 30, b"\n"])
    elif how == "remove":
        del content[place : place + chance.randrange(1, 40)]
    elif how == "double":
        content = content + content
    file.unlink()  # two checkpoints may be one file
    if how == "folder":
        file.mkdir()
    elif how != "delete":
        file.write_bytes(b"" if how == "empty" else content)
    return how


@pytest.mark.slow
def test_random_damage_never_leads_to_other_weights(reference, stopped_run, tmp_path):
    """The code is 0 with the weights of the reference, or 2 with one line. There is no traceback and no hang."""
    chance, codes = random.Random(17), {0: 0, 2: 0}
    expected = load_checkpoint(reference / "checkpoints/last.ckpt")["state_dict"]
    for number in range(MUTATIONS):
        run = Path(shutil.copytree(stopped_run, tmp_path / str(number)))
        files = sorted(file for file in run.rglob("*") if file.is_file() and file.name != ".lock")
        file = files[number % len(files)]
        what = f"{file.relative_to(run)}: {damage(file, chance)}"
        begin = time.monotonic()
        done = train(f"resume={run}", code=None)
        assert time.monotonic() - begin < 20, what
        lines = done.stderr.strip().splitlines()
        assert done.returncode in codes, f"{what}\n{done.stderr}"
        assert len(lines) <= 1 or (len(lines) == 2 and "resuming from" in lines[0]), f"{what}\n{done.stderr}"
        codes[done.returncode] += 1
        if done.returncode == 0:
            weights = load_checkpoint(run / "checkpoints/last.ckpt")["state_dict"]
            assert all(torch.equal(weights[name], expected[name]) for name in expected), what
        else:
            assert lines, what
        shutil.rmtree(run)
    assert codes[0] > MUTATIONS // 4
    assert codes[2] > MUTATIONS // 20
    assert os.listdir(tmp_path) == []
