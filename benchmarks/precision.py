"""What lower precision costs: python benchmarks/precision.py [--seeds 3] [--steps 1500] [--json FILE].

Training: the quick start's model for as many steps in bf16 as in fp32, with the same windows in the same order.
Sampling: the last of those models, scored on its validation text with its weights in fp32, bf16 and int8. All figures
are in bits per byte.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from measuring import ROOT, finish, machine, parser, table

from gpt.exchange import checkpoint
from gpt.model.loss import IGNORE
from gpt.sampling.packed import pack_weights
from gpt.sampling.scoring import Score
from gpt.text.batches import validation_batches
from gpt.text.prepare import prepare
from gpt.training.config import validate


def train(precision: str, seed: int, steps: int, folder: Path) -> tuple[Path, float]:
    """The run directory of one training, and its bits per byte."""
    run_dir = Path(tempfile.mkdtemp(dir=folder))
    command = [sys.executable, "train.py", f"horizon={steps}steps", f"seed={seed}", f"run_dir={run_dir}"]
    command += [f"trainer.precision={precision}", f"trainer.validate_every={steps}"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return run_dir, json.loads((run_dir / "metrics.json").read_text())["val_bits_per_byte"]


@torch.no_grad()
def score(run_dir: Path, precision: str) -> float:
    """Bits per byte of the validation text by a model made ready for sampling."""
    payload = checkpoint.load(run_dir / "checkpoints/best.ckpt")
    model, tokenizer = checkpoint.to_model(payload)
    config = validate(payload["config"])
    T = config.model.context_length
    corpora = prepare(config.data, config.tokenizer, T, ROOT / "data/cache", say=lambda line: None)
    pack_weights(model, precision, rows=2)
    text = corpora.sources[0]
    nats, tokens = 0.0, 0
    for idx, targets in validation_batches(text.validation, 32, T):
        nats += F.cross_entropy(
            model(idx).float().flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum"
        ).item()
        tokens += int((targets != IGNORE).sum())
    assert tokenizer.sha256 == corpora.tokenizer.sha256
    return Score(nats, tokens, text.manifest["splits"]["validation"]["bytes"]).bits_per_byte


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=1500)
    args = arguments.parse_args()
    print(machine())
    trained: dict[str, list[float]] = {"fp32": [], "bf16": []}
    with tempfile.TemporaryDirectory() as name:
        for seed in range(1, args.seeds + 1):
            for precision, found in trained.items():
                run_dir, bits = train(precision, seed, args.steps, Path(name))
                found.append(bits)
        sampled = {precision: score(run_dir, precision) for precision in ("fp32", "bf16", "int8")}
    rows = [
        [f"trained in {precision}", *(f"{bits:.4f}" for bits in found), f"{statistics.mean(found):.4f}"]
        for precision, found in trained.items()
    ]
    print(table(["bits per byte", *(f"seed {seed}" for seed in range(1, args.seeds + 1)), "mean"], rows))
    rows = [[f"sampled in {precision}", f"{bits:.4f}"] for precision, bits in sampled.items()]
    print("\n" + table([f"trained in bf16, seed {args.seeds}", "bits per byte"], rows))
    finish({"trained": trained, "sampled": sampled, "steps": args.steps}, args.json)


if __name__ == "__main__":
    main()
