"""How long training waits for its batches: python benchmarks/input_wait.py [--json FILE].

Measured by Lightning's profiler on the quick start's model and on GPT-2 124M, each with a corpus prepared beforehand.
"""

import statistics
import tempfile
from pathlib import Path

from lightning import Callback
from lightning.pytorch.profilers import SimpleProfiler
from measuring import finish, machine, parser, table
from training import begin, skip_validation

PRESETS = {
    "mini": ["horizon=400steps", "trainer.micro_batch_size=8"],
    "gpt2_small": [
        "horizon=5steps",
        "model=gpt2_small",
        "tokenizer=gpt2",
        "trainer.tokens_per_step=4096",
        "trainer.micro_batch_size=4",
    ],
}
WAIT, STEP = "[_TrainingEpochLoop].train_dataloader_next", "run_training_batch"  # the profiler's names


class Profile(Callback):
    """Hands a profiler to the trainer, and leaves validation out."""

    def __init__(self) -> None:
        self._profiler = SimpleProfiler()

    def setup(self, trainer, module, stage: str) -> None:
        skip_validation(trainer)
        trainer.profiler = self._profiler

    def seconds(self, name: str) -> list[float]:
        """How long each occurrence of an action took, without the first."""
        return self._profiler.recorded_durations[name][1:]


def measure(preset: str) -> dict:
    """Train; return the medians of wait and step in ms, and the share of waiting in the total."""
    profile = Profile()
    with tempfile.TemporaryDirectory() as folder:
        begin(Path(folder), "data=python_stdlib", "trainer.compile=false", *PRESETS[preset]).fit([profile])
    waits, steps = profile.seconds(WAIT), profile.seconds(STEP)
    return {
        "steps": len(steps),
        "wait_ms": 1000 * statistics.median(waits),
        "step_ms": 1000 * statistics.median(steps),
        "share": sum(waits) / (sum(waits) + sum(steps)),
    }


def main() -> None:
    args = parser(__doc__).parse_args()
    print(machine())
    reports = {preset: measure(preset) for preset in PRESETS}
    rows = [
        [name, str(r["steps"]), f"{r['step_ms']:.1f}", f"{r['wait_ms']:.3f}", f"{r['share']:.2%}"]
        for name, r in reports.items()
    ]
    print(table(["", "steps", "ms a step", "ms a wait", "waiting"], rows))
    finish(reports, args.json)


if __name__ == "__main__":
    main()
