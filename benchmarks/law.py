"""Losses of models of several sizes after several numbers of tokens, on several texts, for a law that predicts them.

python benchmarks/law.py --text FILE ... [--points FILE]

Each model trains with the rates that follow from its shape, on the training part of each text as in search.py. A line
of JSON for each is appended to --points; what is there already is not trained again.
"""

import json
from contextlib import ExitStack
from pathlib import Path

from measuring import parser
from search import train_all, training_part

SHAPES = ((2, 64), (3, 96), (4, 128), (6, 192), (8, 256))  # layers and channels; heads of 32
STEPS = (250, 1000, 4000)  # of 1,024 tokens
MOST_WORK = 6 * 192**2 * 4000  # layers, channels squared, steps


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--text", type=Path, nargs="+", required=True)
    arguments.add_argument("--points", type=Path, default=Path("law.jsonl"))
    args = arguments.parse_args()
    known = [json.loads(line) for line in args.points.read_text().splitlines()] if args.points.exists() else []
    done = {(point["text"], *(point[key] for key in ("layers", "channels", "steps"))) for point in known}
    grid = [(steps, *shape) for steps in STEPS for shape in SHAPES if steps * shape[0] * shape[1] ** 2 <= MOST_WORK]
    with ExitStack() as stack:
        texts = [stack.enter_context(training_part(file)) for file in args.text]
        todo = [
            (steps, layers, channels, text)
            for steps, layers, channels in grid
            for text in texts
            if (text.name, layers, channels, steps) not in done
        ]
        jobs = [
            (
                f"model.num_layers={layers} model.d_model={channels} model.num_heads={channels // 32} "
                f"horizon={steps}steps data.validation_bytes=150000 logger=[csv]",
                1,
                text,
            )
            for steps, layers, channels, text in todo
        ]
        for (steps, layers, channels, text), found in zip(todo, train_all(jobs), strict=True):
            if "error" in found:
                print(f"{found['overrides']}: {found['error']}", flush=True)
                continue
            point = {"text": text.name, "layers": layers, "channels": channels, "steps": steps} | found
            with args.points.open("a") as stream:
                stream.write(json.dumps(point) + "\n")
            print(f"{text.name}, {layers} x {channels}, {steps} steps: {point['val_bits_per_byte']:.4f}", flush=True)


if __name__ == "__main__":
    main()
