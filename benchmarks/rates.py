"""Whether the rates of `OptimConfig.for_model` are right: python benchmarks/rates.py --text FILE ... [--steps 250 800].

For models from 2 layers of 64 channels to 8 of 256, the learning rates that follow from the shape, and half and twice
of each alone, on the training part of each text as in search.py. A row is a model, a text and a horizon: bits per byte
with the rule, what the best of its neighbours gains, and the range of --seeds (2) with the rule.
"""

from contextlib import ExitStack
from pathlib import Path

from measuring import finish, machine, parser, table
from search import train_all, training_part

from gpt.model.transformer import ModelConfig
from gpt.training.optim import OptimConfig

SHAPES = ((2, 64), (4, 128), (6, 192), (8, 256))  # layers and channels; heads of 32
CHANGES = ((1.0, 1.0), (0.5, 1.0), (2.0, 1.0), (1.0, 0.5), (1.0, 2.0))  # of matrix_lr and lr


def overrides(layers: int, channels: int, steps: int, change: tuple[float, float]) -> str:
    shape = ModelConfig(num_layers=layers, d_model=channels, num_heads=channels // 32)
    optim = OptimConfig().for_model(shape)
    assert optim.matrix_lr and optim.lr
    rates = f"optim.matrix_lr={optim.matrix_lr * change[0]:.5g} optim.lr={optim.lr * change[1]:.5g}"
    model = f"model.num_layers={layers} model.d_model={channels} model.num_heads={shape.num_heads}"
    return f"{model} horizon={steps}steps data.validation_bytes=150000 logger=[csv] {rates}"


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--text", type=Path, nargs="+", required=True)
    arguments.add_argument("--steps", type=int, nargs="+", default=[250, 800])
    arguments.add_argument("--seeds", type=int, default=2)
    args = arguments.parse_args()
    print(machine())
    rows, report = [], {}
    with ExitStack() as stack:
        texts = [stack.enter_context(training_part(file)) for file in args.text]
        for steps in args.steps:
            for layers, channels in SHAPES:
                for text in texts:
                    jobs = [(change, 1) for change in CHANGES] + [(CHANGES[0], s) for s in range(2, args.seeds + 1)]
                    made = [(overrides(layers, channels, steps, change), seed, text) for change, seed in jobs]
                    bits = [found["val_bits_per_byte"] for found in train_all(made)]
                    rule, neighbours, seeds = bits[0], bits[1:5], [bits[0], *bits[5:]]
                    name = f"{layers} x {channels}, {text.name}, {steps} steps"
                    report[name] = {"rule": rule, "neighbours": neighbours, "seeds": seeds}
                    gain = f"{100 * (rule / min(neighbours) - 1):+.2f}%"
                    rows.append([name, *(f"{b:.4f}" for b in [rule, *neighbours]), gain,
                                 f"{100 * (max(seeds) / min(seeds) - 1):.2f}%"])  # fmt: skip
                    print("  ".join(rows[-1]), flush=True)
    head = ["bits per byte", "rule", "matrix_lr / 2", "x 2", "lr / 2", "x 2", "worse than the best", "seeds"]
    print(table(head, rows))
    finish({"rates": report}, args.json)


if __name__ == "__main__":
    main()
