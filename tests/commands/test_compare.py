"""`python -m gpt.compare` prints the best runs first, with what differs, and whether that exceeds the seeds' noise."""

import json
from pathlib import Path

import pytest
import yaml

from gpt import compare
from harness import begin_run, fit, refusal, tiny_config, write_corpus

# Bits per byte at steps of 100 tokens, and settings.
RUNS = {
    "slow": ([(2, 5.0), (4, 1.5), (6, 2.0)], {"seed": 1, "optim": {"lr": 0.003}}),
    "fast": ([(2, 4.0), (4, 3.5)], {"seed": 1, "optim": {"lr": 0.006}}),
    "new": ([], {"seed": 2, "optim": {"lr": 0.006}}),
}


def write_run(folder: Path, points: list[tuple[int, float]], config: dict) -> Path:
    """Write a run directory. 2 nats per token are 1 bit per byte, and a step takes 2 seconds."""
    folder.mkdir(parents=True)
    config = {"run_dir": str(folder), "decided": None, "overrides": {"run_dir": str(folder)}} | config
    config["data"] = {"name": "docs"} | config.get("data", {})
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    if points:
        step, bits = points[-1]
        metrics = {"val_loss": 2 * bits, "val_bits_per_byte": bits, "best_val_loss": 2 * min(b for _, b in points)}
        metrics |= {"steps": step, "train_seconds": 2 * step, "git_commit": "a" * 40}
        (folder / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
    return folder


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    """The folder runs/ of the working directory, with three runs."""
    monkeypatch.chdir(tmp_path)
    for name, run in RUNS.items():
        write_run(tmp_path / "runs" / name, *run)
    return Path("runs")


def read_rows(capsys, *arguments: str | Path) -> list[dict]:
    """Return the rows of the first table that the command prints with --json."""
    compare.main([*map(str, arguments), "--json"])
    return json.loads(capsys.readouterr().out)[0]["runs"]


def read_lines(capsys, *arguments: str) -> list[str]:
    """Return the lines that the command prints."""
    compare.main([*arguments])
    return capsys.readouterr().out.splitlines()


def test_runs_are_sorted_by_their_best_validation(runs, capsys):
    """A run without a validation comes last."""
    rows = read_rows(capsys, "fast", runs / "slow", "new")
    assert [row["run"] for row in rows] == ["slow", "fast", "new"]
    assert [row["best"] for row in rows] == [1.5, 3.5, None]
    assert [row["steps"] for row in rows] == [6, 4, None]
    assert [row["train_seconds"] for row in rows] == [12, 8, None]
    assert [row["settings"]["optim.lr"] for row in rows] == [0.003, 0.006, 0.006]
    assert read_rows(capsys) == rows
    assert read_rows(capsys, *sorted(runs.iterdir())) == rows  # as the shell expands runs/*


def test_each_dataset_has_a_table(runs, capsys):
    """A table has 80 columns. The settings that differ within it are below each run."""
    write_run(runs / "book", [(2, 3.75)], {"data": {"name": "text", "path": "\x1b[31m" + "x" * 60 + ".txt"}})
    (runs / "new/metrics.json").write_text((runs / "fast/metrics.json").read_text().replace("a" * 40, "b-dirty"))
    assert read_lines(capsys) == [
        "validation in bits per byte, best first",
        "",
        "data.name=text  data.path=\\u001b[31mxxxxxxxx...xxxxxxxxxxxxxxx.txt",
        "    best     std    runs   steps seconds  run",
        "  3.7500       -       1       2     4.0  book",
        "",
        "data.name=docs",
        "    best     std    runs   steps seconds  run",
        "  1.5000       -       1       6    12.0  slow",
        "          optim.lr=0.003  code=aaaaaaa",
        "  3.5000       -       1       4     8.0  fast",
        "          optim.lr=0.006  code=aaaaaaa",
        "  3.5000       -       1       4     8.0  new",
        "          optim.lr=0.006  code=b-dirty",
    ]


def test_differences_are_compared_with_the_noise_of_seeds(runs, capsys):
    """By hand: deviations 0.1 and 0.1 with 4 degrees of freedom give t sqrt(0.01 (1/3 + 1/3)) = 2.78 x 0.0816."""
    for seed, bits in enumerate((1.9, 2.0, 2.1)):
        write_run(runs / f"near-{seed}", [(6, bits + 0.2)], {"seed": seed, "optim": {"lr": 0.1}})
        write_run(runs / f"far-{seed}", [(6, bits + 0.3)], {"seed": seed, "optim": {"lr": 0.2}})
        write_run(runs / f"best-{seed}", [(6, bits)], {"data": {"seed": seed}, "optim": {"lr": 0.3}})
    near, far, best = ([f"{name}-{i}" for i in range(3)] for name in ("near", "far", "best"))
    rows = read_rows(capsys, *near, *far, *best)
    assert [(row["run"], row["runs"]) for row in rows] == [("best-0", 3), ("near-0", 3), ("far-0", 3)]
    assert [row["best"] for row in rows] == pytest.approx([2.0, 2.2, 2.3])
    assert [row["std"] for row in rows] == pytest.approx([0.1] * 3)
    assert read_lines(capsys, *best, *near)[3:] == [
        "  2.0000  0.1000       3       6    12.0  best-0",
        "          optim.lr=0.3",
        "  2.2000  0.1000       3       6    12.0  near-0",
        "          optim.lr=0.1",
        "          worse by 0.2000, within the seeds' noise of 0.2270",
    ]
    assert read_lines(capsys, *best, *far)[-1].endswith("worse by 0.3000, more than the seeds' noise of 0.2270")
    write_run(runs / "again", [(6, 1.9)], {"data": {"seed": 0}, "optim": {"lr": 0.3}})
    assert sorted(row["runs"] for row in read_rows(capsys, *best, "again")) == [1, 3]


def test_a_loss_of_zero_is_the_best(runs, capsys):
    """A text of a single letter is learned to a loss of exactly 0. Its seeds have no noise."""
    for seed in range(2):
        write_run(runs / f"letter-{seed}", [(2, 0.5), (4, 0.0)], {"seed": seed, "optim": {"lr": 0.3}})
    rows = read_rows(capsys)
    assert [(row["run"], row["best"]) for row in rows[:2]] == [("letter-0", 0.0), ("slow", 1.5)]
    assert (rows[0]["runs"], rows[0]["std"], rows[1]["worse_by"]) == (2, 0.0, 1.5)


@pytest.mark.parametrize(("horizon", "sizes"), [("6steps", [1, 1]), ("6min", [2])])
def test_runs_of_one_group_have_as_many_steps(runs, capsys, horizon, sizes):
    """A run that stopped early is in no group. With a time as horizon, the number of steps varies by chance."""
    for seed, steps in enumerate((4, 6)):
        write_run(runs / f"run-{seed}", [(steps, 3.0)], {"seed": seed, "horizon": horizon})
    assert [row["runs"] for row in read_rows(capsys, "run-0", "run-1")] == sizes


def test_a_trained_run_is_read(tmp_path):
    write_corpus(tmp_path)
    training = begin_run(tiny_config(tmp_path, "horizon=20steps", f"run_dir={tmp_path / 'run'}"))
    fit(training)
    run = compare.read_run(tmp_path / "run")
    assert (run.name, run.metrics["steps"], run.settings["seed"]) == (str(tmp_path / "run"), 20, training.config.seed)
    bits_per_nat = training.metrics["val_bits_per_byte"] / training.metrics["val_loss"]
    assert run.best == pytest.approx(training.metrics["best_val_loss"] * bits_per_nat)


def test_folders_that_are_no_run_are_refused(tmp_path, runs, monkeypatch):
    for name in ("nowhere", "runs"):
        assert "not a run directory (it has no config.yaml)" in refusal(compare.main, ["fast", name])
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert refusal(compare.main, []) == "there are no runs in runs/: train one first with python train.py"


def test_if_no_run_can_be_read_every_damaged_one_is_named(runs, capsys):
    for name in RUNS:
        (runs / name / "metrics.json").write_text("{")
    assert refusal(compare.main, []) == "no run in runs/ can be read: train one with python train.py"
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": damaged (")[0] for line in lines] == [
        f"gpt.compare: runs/{n}/metrics.json" for n in sorted(RUNS)
    ]


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("config.yaml", "trainer: [", "cannot be read (while parsing"),
        ("config.yaml", "- 1", "damaged ('list' object has no attribute"),
        ("metrics.json", "{}", "damaged (it has no 'val_loss')"),
        ("metrics.json", "[" * 10**5, "damaged (it is nested too deeply"),
        ("metrics.json", '{"val_loss": 0, "val_bits_per_byte": 0, "best_val_loss": 1}', "damaged (float division by"),
    ],
)
def test_a_damaged_run_is_named_and_left_out(runs, capsys, file, content, reason):
    """If the command line names the run, it is refused."""
    (runs / "fast" / file).write_text(content, encoding="utf-8")
    line = refusal(compare.main, ["slow", "fast"])
    assert line.startswith(f"runs/fast/{file}: {reason}")
    compare.main([])
    captured = capsys.readouterr()
    assert captured.err == f"gpt.compare: {line}\n"
    assert "  slow" in captured.out and "  fast" not in captured.out
