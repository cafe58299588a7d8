"""Quality after a given time: python benchmarks/quality.py --text FILE [--seeds 1] [--seconds 60] [--json FILE].

The peer is nanoGPT's CPU recipe on a plain model: 4 layers, 4 heads, 128 channels, sequences of 64 characters, batches
of 12, fp32, AdamW from 1e-3 to 1e-4 over 2,000 steps. Ours is `python train.py experiment=shakespeare` as a user runs
it, three times: for nearly an eighth of the peer's time, for nearly all of it, and for `--seconds`. The durations of
our step and the peer's step, measured in turn, give the numbers of steps. All models are scored in nats per byte of the
last tenth of the text, in windows of their context length that do not overlap. Seconds count training steps alone.
"""

import math
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import torch
import torch.nn.functional as F
from measuring import Worker, describe_machine, format_table, make_parser, train_as_user, write_report
from torch import Tensor
from train_step import PRESETS
from train_step import ours as mini_step

from gpt.hardware.device import choose_device, choose_precision
from gpt.model.transformer import GPT, GPTConfig

STEPS, WARM_UP, CONTEXT, BATCH = 2000, 100, 64, 12
_, _, ON_CPU, _ = PRESETS["mini"]  # (B, T) of a step of ours, on any device
FIGURES = ("nats_per_byte", "bits_per_byte", "seconds", "steps")
PEER_TIME_FRACTION = 0.95  # our loop takes time around the steps measured here
SECONDS_FRACTION = 0.85  # steps are measured at the start, when the machine is cool and faster


def make_peer(text: str, seed: int) -> tuple[GPT, Callable[[], None], Tensor]:
    """Return the peer's model, the function that takes its next step, and the ids of the validation text."""
    torch.manual_seed(seed)
    characters = sorted(set(text))
    id_of_character = {character: i for i, character in enumerate(characters)}
    ids = torch.tensor([id_of_character[character] for character in text])
    num_train = len(ids) - len(ids) // 10
    train, validation = ids[:num_train], ids[num_train:]
    model = GPT(GPTConfig(CONTEXT, 128, 4, 4, vocab_size=len(characters)))
    for block in model.blocks:
        block.attention.fused_kernel = True
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    not_decayed = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": not_decayed, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)
    step_numbers = count()

    def step() -> None:
        step = next(step_numbers)
        progress = (step - WARM_UP) / (STEPS - WARM_UP)
        lr = 1e-3 * (step + 1) / WARM_UP if step < WARM_UP else 1e-4 + 4.5e-4 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = lr
        positions = torch.randint(len(train) - CONTEXT, (BATCH, 1)) + torch.arange(CONTEXT + 1)
        sequences = train[positions]
        loss = F.cross_entropy(model(sequences[:, :-1]).flatten(0, 1), sequences[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, step, validation


def peer_step(text: str) -> Callable[[], None]:
    return make_peer(text, seed=0)[1]


def peer(text: str, seed: int) -> dict:
    """Train the peer; return the seconds of its steps and its nats per byte (in this text a character is a byte)."""
    model, step, validation = make_peer(text, seed)
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    seconds = time.perf_counter() - begin
    nats = 0.0
    with torch.no_grad():
        for start in range(0, len(validation) - 1, CONTEXT):
            window = validation[start : start + CONTEXT + 1]
            nats += F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="sum").item()
    return {"seconds": seconds, "nats_per_byte": nats / (len(validation) - 1), "steps": STEPS}


def step_times(text: str) -> tuple[float, float]:
    """Measure a step of the peer and a step of ours in turn, in seconds."""
    dtype = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[choose_precision("auto", choose_device())]
    workers = [
        Worker("peer", peer_step, text=text),
        Worker("ours", mini_step, preset="mini", dtype=dtype, optim="muon", shape=ON_CPU),
    ]
    for worker in workers:
        worker.run(20)
        worker.times.clear()
    for _ in range(15):
        for worker in workers:
            worker.run(30)
    for worker in workers:
        worker.close()
    peer_step_time, our_step_time = (statistics.fmean(worker.times) for worker in workers)
    print(f"a step, measured in turn: peer {1000 * peer_step_time:.1f} ms, ours {1000 * our_step_time:.1f} ms")
    return peer_step_time, our_step_time


def ours(text: Path, seed: int, steps: int, folder: Path) -> dict:
    """Train as a user would; return the figures that the peer has as well."""
    overrides = ["experiment=shakespeare", "data=text", f"data.path={text}", f"data.cache={folder / 'cache'}"]
    _, metrics = train_as_user(folder, *overrides, f"seed={seed}", f"horizon={steps}steps")
    nats_per_byte = metrics["val_nats_per_byte"]
    return {"seconds": metrics["train_seconds"], "nats_per_byte": nats_per_byte, "steps": metrics["steps"]}


def row(name: str, figures: dict) -> list[str]:
    quality = [f"{figures[key]:.4f}" for key in ("nats_per_byte", "bits_per_byte")]
    return [name, *quality, f"{figures['seconds']:.1f}", f"{figures['steps']:.0f}"]


def main() -> None:
    arguments = make_parser(__doc__)
    arguments.add_argument("--text", type=Path, required=True)
    arguments.add_argument("--seeds", type=int, default=1)
    arguments.add_argument("--seconds", type=float, default=60.0)
    args = arguments.parse_args()
    text = args.text.read_text(encoding="utf-8")
    print(describe_machine())
    peer_step_time, our_step_time = step_times(text)
    budgets = {
        "ours, an eighth": PEER_TIME_FRACTION * STEPS * peer_step_time / 8,
        "ours, its time": PEER_TIME_FRACTION * STEPS * peer_step_time,
        f"ours, {args.seconds:g} s": SECONDS_FRACTION * args.seconds,
    }
    results: dict[str, list[dict]] = {}
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for seed in range(1, args.seeds + 1):
            measured = {"peer": peer(text, seed)}
            for variant, seconds in budgets.items():
                steps = max(1, round(seconds / our_step_time))
                measured[variant] = ours(args.text.resolve(), seed, steps, Path(name))
            for variant, figures in measured.items():
                figures["bits_per_byte"] = figures["nats_per_byte"] / math.log(2)
                results.setdefault(variant, []).append(figures)
                rows.append(row(f"{variant}, seed {seed}", figures))
                print("  ".join(rows[-1]))
    for variant, runs in results.items():
        for name, statistic in (("mean", statistics.fmean), ("standard deviation", statistics.stdev)):
            if len(runs) > 1:
                figures = {key: statistic([run[key] for run in runs]) for key in FIGURES}
                rows.append(row(f"{variant}, {name}", figures))
    print(format_table(["", "nats/byte", "bits/byte", "seconds", "steps"], rows))
    report = {
        "text": args.text.name,
        "peer_step_seconds": peer_step_time,
        "our_step_seconds": our_step_time,
        "runs": results,
    }
    write_report(report, args.json)


if __name__ == "__main__":
    main()
