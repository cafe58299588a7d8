"""`python -m gpt.compare`: the best runs first, what differs, and losses at equal tokens and time."""

import json
from pathlib import Path

import pytest
import yaml

from gpt import compare
from gpt.files import hold
from gpt.training.run_directory import REFERENCES as LINES
from harness import begin_run, fit, refusal, tiny_config, write_corpus

# Bits per byte at steps of 100 tokens, the seconds that 2 steps take, and settings.
RUNS = {
    "slow": ([(2, 5.0), (4, 3.0), (6, 2.0)], 4.0, {"seed": 1, "optim": {"lr": 0.003}}),
    "fast": ([(2, 4.0), (4, 3.5)], 1.0, {"seed": 1, "optim": {"lr": 0.006}}),
    "new": ([], 1.0, {"seed": 2, "optim": {"lr": 0.006}}),
}


def write_run(folder: Path, points: list, seconds: float, config: dict, **figures) -> Path:
    """A run directory with what is compared: 2 nats per token are 1 bit per byte."""
    folder.mkdir(parents=True)
    config = {"trainer": {"tokens_per_step": 100}, "run_dir": str(folder)} | config
    config["data"] = {"name": "docs"} | config.get("data", {})
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    if points:
        step, bits = points[-1]
        given = {"val_loss": 2 * bits, "val_bits_per_byte": bits, "best_val_loss": 2 * min(b for _, b in points)}
        given |= {"steps": step, "train_seconds": seconds * step / 2, "tokens_per_second": 200 / seconds}
        (folder / "metrics.json").write_text(json.dumps(given | figures), encoding="utf-8")
        rows = [f"{step},{tag},{value}" for step, b in points
                for tag, value in (("val/bits_per_byte", b), ("work/tokens_per_second", 200 / seconds))]  # fmt: skip
        (folder / "metrics.csv").write_text("\n".join(["step,tag,value", *rows, ""]), encoding="utf-8")
    return folder


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    """The folder runs/ of the working directory, with three runs."""
    monkeypatch.chdir(tmp_path)
    for name, run in RUNS.items():
        write_run(tmp_path / "runs" / name, *run)
    return Path("runs")


def output(capsys, *arguments: str | Path):
    """What the command prints with --json."""
    compare.main([*map(str, arguments), "--json"])
    return json.loads(capsys.readouterr().out)[0]


def test_equal_tokens_and_seconds(runs, capsys):
    """The best first; beside it the loss where the shorter run ends, on a line between two validations."""
    found = output(capsys, "fast", runs / "slow", "new")
    assert found["equal"] == {"tokens": 400.0, "seconds": 2.0}
    assert [row["run"] for row in found["runs"]] == ["slow", "fast", "new"]
    assert [row["best"] for row in found["runs"]] == [2.0, 3.5, None]
    assert [row["at_equal_tokens"] for row in found["runs"]] == [3.0, 3.5, None]
    assert [row["at_equal_seconds"] for row in found["runs"]] == [None, 3.5, None]  # slow is validated after 4 s
    assert [row["steps"] for row in found["runs"]] == [6, 4, None]
    assert found["runs"][0]["differs"] == {"optim.lr": 0.003, "seed": 1}
    write_run(runs / "later", [(4, 6.0), (6, 4.0), (10, 3.0)], 1.0, {})
    later = output(capsys, "slow", "later")["runs"][1]
    assert (later["at_equal_tokens"], later["at_equal_seconds"]) == (4.0, 3.0)


def test_table(runs, capsys):
    """On 80 columns; a key is shown where most of the runs have another value, which stands below."""
    long = "text/" + "x" * 60 + ".txt"
    write_run(
        runs / "other", [(2, 3.75)], 2.0, {"seed": 1, "optim": {"lr": 0.006}, "data": {"name": "text", "path": long}}
    )
    write_run(
        runs / "book",
        [(2, 3.6)],
        2.0,
        {"seed": 1, "optim": {"lr": 0.006}, "data": {"name": "text", "path": "\x1b[31m"}},
    )
    compare.main([])
    assert capsys.readouterr().out.splitlines() == [
        "validation in bits per byte, best first; -: not reached, or the scatter of a",
        "single run",
        "",
        "data.name=text  data.path=\\u001b[31m",
        "    best   steps seconds  run",
        "  3.6000       2     2.0  book",
        "",
        "data.name=docs",
        "    best   steps seconds  run",
        "  2.0000       6    12.0  slow",
        "          optim.lr=0.003",
        "  3.5000       4     2.0  fast",
        "       -       -       -  new: no validation yet",
        "          seed=2",
        "settings of all runs that do not name another: seed=1  optim.lr=0.006",
        "",
        "data.name=text  data.path=text/xxxxxxxxxxxxx...xxxxxxxxxxxxxxx.txt",
        "    best   steps seconds  run",
        "  3.7500       2     2.0  other",
    ]
    compare.main(["slow", "fast"])
    assert capsys.readouterr().out.splitlines() == [
        "validation in bits per byte, best first; -: not reached, or the scatter of a",
        "single run",
        "tokens: after 400; time: after 2.0 s of training",
        "    best  tokens    time   steps seconds  run",
        "  2.0000  3.0000       -       6    12.0  slow",
        "          optim.lr=0.003",
        "  3.5000  3.5000  3.5000       4     2.0  fast",
        "          optim.lr=0.006",
    ]


def test_seeds(tmp_path, runs, capsys):
    """Runs that differ in seeds alone make a group with mean and scatter, and differences are judged by them.

    Checked by hand: scatters 0.1 and 0.1 with 4 degrees of freedom, so t sqrt(0.01 (1/3 + 1/3)) = 2.78 x 0.0816.
    """
    for seed, bits in enumerate((1.9, 2.0, 2.1)):
        write_run(
            runs / f"near-{seed}", [(6, bits + 0.2)], 4.0, {"seed": seed, "optim": {"lr": 0.1}}, git_commit="a" * 40
        )
        write_run(
            runs / f"far-{seed}", [(6, bits + 0.3)], 4.0, {"seed": seed, "optim": {"lr": 0.2}}, git_commit="b-dirty"
        )
        write_run(runs / f"best-{seed}", [(6, bits)], 4.0, {"data": {"seed": seed}, "optim": {"lr": 0.3}})
    near, far, best = ([f"{name}-{i}" for i in range(3)] for name in ("near", "far", "best"))
    found = output(capsys, *near, *far, *best)["runs"]
    assert [(row["run"], row["runs"], row["code"]) for row in found] == [
        ("best-0", 3, ""), ("near-0", 3, "aaaaaaa"), ("far-0", 3, "b+changes")
    ]  # fmt: skip
    assert [row["best"] for row in found] == pytest.approx([2.0, 2.2, 2.3])
    assert [row["scatter"] for row in found] == pytest.approx([0.1] * 3)
    compare.main([*best, *near])
    assert capsys.readouterr().out.splitlines()[4:] == [
        "  2.0000  0.1000       3  2.0000  2.0000       6    12.0  best-0",
        "          optim.lr=0.3",
        "  2.2000  0.1000       3  2.2000  2.2000       6    12.0  near-0",
        "          optim.lr=0.1",
        "          worse than the first by 0.2000, no more than seeds explain (0.2270)",
    ]
    compare.main([*best, *far])
    assert capsys.readouterr().out.splitlines()[-1].endswith("by 0.3000, more than seeds explain (0.2270)")
    write_run(runs / "again", [(6, 1.9)], 4.0, {"data": {"seed": 0}, "optim": {"lr": 0.3}})
    assert sorted(row["runs"] for row in output(capsys, *best, "again")["runs"]) == [1, 3]
    for seed, steps in enumerate((4, 6)):  # one was stopped early, so it is none of the group
        write_run(runs / f"short-{seed}", [(steps, 3.0)], 4.0, {"seed": seed, "horizon": "6steps"})
    assert [row["runs"] for row in output(capsys, "short-0", "short-1")["runs"]] == [1, 1]


def test_a_run_that_trains(runs, capsys):
    """It is marked, by the lock that its process holds."""
    lock = hold(runs / "slow/.lock")
    compare.main([])
    lock.release()
    assert "slow: still training" in capsys.readouterr().out
    compare.main([])
    assert "training" not in capsys.readouterr().out


def test_all_of_a_folder(runs, capsys):
    """As the shell makes it of runs/*, with the lines of references."""
    (runs / LINES).mkdir()
    assert len(output(capsys, *sorted(runs.iterdir()))["runs"]) == 3


def test_curves_of_a_real_run(tmp_path):
    """metrics.csv ends where metrics.json says, and without it there is that end."""
    write_corpus(tmp_path)
    training = begin_run(tiny_config(tmp_path, "horizon=20steps", f"run_dir={tmp_path / 'run'}"))
    fit(training)
    run = compare.read_run(tmp_path / "run")
    tokens, seconds, bits = run.curve
    assert tokens.tolist() == [480, 960, 1440, 1920]
    assert bits[-1] == pytest.approx(training.metrics["val_bits_per_byte"])
    assert seconds[-1] == pytest.approx(training.metrics["train_seconds"], rel=0.05)
    assert run.best == pytest.approx(bits.min())
    (tmp_path / "run/metrics.csv").unlink()  # as with logger=[]
    run = compare.read_run(tmp_path / "run")
    assert run.curve[:, 0] == pytest.approx([1920, training.metrics["train_seconds"], bits[-1]])


def test_not_a_run(tmp_path, runs, monkeypatch):
    """A folder that is none, and a name that is nowhere; without any run, the command that makes one is named."""
    for name in ("nowhere", "runs"):
        assert "not a run directory (it has no config.yaml)" in refusal(compare.main, ["fast", name])
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert refusal(compare.main, []) == "there are no runs in runs/: train one first with python train.py"


@pytest.mark.parametrize("content", ["", "{}", "{", '{"val_loss": 1'])
def test_no_run_can_be_read(tmp_path, runs, capsys, content):
    """Each damaged one is named in a line, and the last line says that there is no other."""
    names = sorted(folder.name for folder in (tmp_path / "runs").iterdir())
    for name in names:
        (tmp_path / "runs" / name / "metrics.json").write_text(content)
    assert refusal(compare.main, []) == "no run in runs/ can be read: train one with python train.py"
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": damaged (")[0] for line in lines] == [f"gpt.compare: runs/{n}/metrics.json" for n in names]


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("config.yaml", "trainer: [", "cannot be read (while parsing"),
        ("config.yaml", "seed: 1", "damaged (it has no 'trainer.tokens_per_step')"),
        ("config.yaml", "- 1", "damaged ('list' object has no attribute"),
        ("config.yaml", "trainer: {tokens_per_step: many}", "damaged (invalid literal for int"),
        ("metrics.json", "{", "damaged (Expecting"),
        ("metrics.json", "{}", "damaged (it has no 'val_loss')"),
        ("metrics.json", "[]", "damaged (list indices"),
        ("metrics.json", '{"val_loss": "low"}', "damaged (could not convert"),
        ("metrics.json", '{"val_loss": null}', "damaged (float"),
        ("metrics.json", "[" * 10**5, "damaged (it is nested too deeply"),
        ("metrics.csv", "x,val/bits_per_byte,3", "damaged (could not convert"),
        ("metrics.csv", "1,val/bits_per_byte", "damaged (float"),
    ],
)
def test_damaged_run(runs, capsys, file, content, reason):
    """The file is named in one line; the table of all runs leaves that run out."""
    if file == "metrics.csv":
        content = f"step,tag,value\n{content}"
    (runs / "fast" / file).write_text(content, encoding="utf-8")
    line = refusal(compare.main, ["slow", "fast"])
    assert line.startswith(f"runs/fast/{file}: {reason}")
    compare.main([])
    shown = capsys.readouterr()
    if file != "metrics.csv":  # whose figures are not in the table of all runs
        assert shown.err == f"gpt.compare: {line}\n"
        assert "  fast" not in shown.out
    assert "  slow" in shown.out
