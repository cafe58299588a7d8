"""What lower precision costs: python benchmarks/precision.py [--seeds 1] [--steps 500] [--json FILE].

Training: the quick start's model in fp32 and in bf16, on the same sequences in the same order. Sampling: the last
model, scored on its validation text with weights in fp32, bf16 and int8. All figures are bits per byte.
"""

import statistics
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from measuring import describe_machine, format_table, make_parser, train_as_user, write_report

from gpt.data.batches import validation_batches
from gpt.loading import open_model
from gpt.model.loss import IGNORE_INDEX
from gpt.sampling.packed import pack_weights
from gpt.sampling.scoring import Score
from gpt.training.config import load_config
from gpt.training.start import load_dataset


@torch.no_grad()
def score(run_dir: Path, precision: str) -> float:
    """Return the bits per byte of the run's validation text for its best model, packed as for sampling."""
    config = load_config(run_dir / "config.yaml")
    dataset = load_dataset(config, quiet=True)
    model, tokenizer = open_model(run_dir)
    assert tokenizer.sha256 == dataset.tokenizer.sha256
    pack_weights(model, precision, rows=2)
    source = dataset.sources[0]
    nats, tokens = 0.0, 0
    for idx, targets in validation_batches(source.validation, 32, config.model.context_length, IGNORE_INDEX):
        logits = model(idx).float().flatten(0, 1)  # `scoring.score` would not use the packed head
        nats += F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum").item()
        tokens += int((targets != IGNORE_INDEX).sum())
    return Score(nats, tokens, source.metadata["splits"]["validation"]["bytes"]).bits_per_byte


def main() -> None:
    arguments = make_parser(__doc__)
    arguments.add_argument("--seeds", type=int, default=1)
    arguments.add_argument("--steps", type=int, default=500)
    args = arguments.parse_args()
    print(describe_machine())
    trained: dict[str, list[float]] = {"fp32": [], "bf16": []}
    with tempfile.TemporaryDirectory() as name:
        for seed in range(1, args.seeds + 1):
            for precision, results in trained.items():
                overrides = [f"horizon={args.steps}steps", f"seed={seed}", f"trainer.precision={precision}"]
                run_dir, metrics = train_as_user(Path(name), *overrides)
                results.append(metrics["val_bits_per_byte"])
        sampled = {precision: score(run_dir, precision) for precision in ("fp32", "bf16", "int8")}
    rows = [
        [f"trained in {precision}", *(f"{bits:.4f}" for bits in results), f"{statistics.mean(results):.4f}"]
        for precision, results in trained.items()
    ]
    print(format_table(["bits per byte", *(f"seed {seed}" for seed in range(1, args.seeds + 1)), "mean"], rows))
    rows = [[f"sampled in {precision}", f"{bits:.4f}"] for precision, bits in sampled.items()]
    print("\n" + format_table([f"trained in bf16, seed {args.seeds}", "bits per byte"], rows))
    write_report({"trained": trained, "sampled": sampled, "steps": args.steps}, args.json)


if __name__ == "__main__":
    main()
