"""How long a training waits for its batches: python benchmarks/input_wait.py [--json].

Lightning's own profiler, over the quick start's model and GPT-2 124M, each on a corpus that was prepared before.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from lightning.pytorch.profilers import SimpleProfiler

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gpt import hardware
from gpt.model.transformer import ModelConfig  # noqa: E402
from gpt.text.corpus import DataConfig  # noqa: E402
from gpt.text.prepare import prepare  # noqa: E402
from gpt.text.tokenizer import TokenizerConfig  # noqa: E402
from gpt.training import module as lit  # noqa: E402
from gpt.training.callbacks import CheckpointFiles  # noqa: E402
from gpt.training.config import Config, TrainerConfig  # noqa: E402

# As the profiler names what Lightning's loop does.
NEXT, STEP = "[_TrainingEpochLoop].train_dataloader_next", "run_training_batch"


def measure(model: ModelConfig, tokenizer: str, micro_batch: int, steps: int) -> dict:
    """Medians, in ms, of the wait for a batch and of the step on it; and the share of all waiting in all steps."""
    device = hardware.choose_device()
    config = Config(
        model=model,
        data=DataConfig("python_stdlib"),
        tokenizer=TokenizerConfig(tokenizer),
        trainer=TrainerConfig(
            device=device.type,
            precision=hardware.choose_precision("auto", device),
            compile="false",
            tokens_per_step=micro_batch * model.context_length,
            micro_batch_size=str(micro_batch),
        ),
        horizon=f"{steps}steps",
    )
    corpora = prepare(config.data, config.tokenizer, model.context_length, ROOT / "data/cache", say=lambda line: None)
    config, plan = lit.make_plan(config, corpora, False, print)
    module = lit.GPTModule(config, plan, corpora)
    trainer = lit.build_trainer(config, plan, [], CheckpointFiles())
    trainer.profiler = SimpleProfiler()  # type: ignore[assignment]
    trainer.fit(module, datamodule=lit.GPTData(module))
    waits, works = (trainer.profiler.recorded_durations[name][1:] for name in (NEXT, STEP))
    return {
        "steps": len(works),
        "wait_ms": 1000 * statistics.median(waits),
        "step_ms": 1000 * statistics.median(works),
        "share": sum(waits) / (sum(waits) + sum(works)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    hardware.keep_freed_memory()
    report = {
        "mini": measure(ModelConfig(128, 128, 4, 4), "bpe", 8, 400),
        "gpt2_small": measure(ModelConfig(1024, 768, 12, 12), "gpt2", 4, 5),
    }
    if args.json:
        print(json.dumps(report, indent=2))
        return
    for name, found in report.items():
        print(
            f"{name:12} {found['steps']:4} steps of {found['step_ms']:8.1f} ms, each after a wait of "
            f"{found['wait_ms']:.3f} ms: {found['share']:.2%} of the time"
        )


if __name__ == "__main__":
    main()
