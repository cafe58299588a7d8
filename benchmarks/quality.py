"""What is learnt in a given time: python benchmarks/quality.py --text FILE [--seeds 3] [--seconds 180] [--json FILE].

The peer is nanoGPT's recipe for a CPU as a plain model: 4 layers, 4 heads, 128 channels, windows of 64 characters,
batches of 12, AdamW from 1e-3 to 1e-4 over 2,000 steps, fp32. Ours is `python train.py experiment=shakespeare` as
anybody would run it, for an eighth of the time that the peer took just before, for all of it, and for `--seconds`, of
which it asks for a `SHARE`. Everyone is judged by nats per byte of the last tenth of the text, in windows of the own
context that do not overlap, by the seconds that their steps took.
"""

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from measuring import ROOT, finish, machine, parser, table

from gpt.model import GPT, GPTConfig

STEPS, WARM_UP, CONTEXT, BATCH = 2000, 100, 64, 12
SHARE = 0.85  # of a time that is asked for: it is measured at the start, when a machine that has rested is faster


def peer(text: str, seed: int) -> dict:
    """Train the peer's recipe; returns seconds of stepping and nats per character, which here is a byte."""
    torch.manual_seed(seed)
    characters = sorted(set(text))
    number = {character: i for i, character in enumerate(characters)}
    ids = torch.tensor([number[character] for character in text])
    cut = len(ids) - len(ids) // 10
    train, validation = ids[:cut], ids[cut:]
    model = GPT(GPTConfig(CONTEXT, 128, 4, 4, vocab_size=len(characters)))
    for block in model.blocks:
        block.attention.fused_kernel = True
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)
    begin = time.perf_counter()
    for step in range(STEPS):
        progress = (step - WARM_UP) / (STEPS - WARM_UP)
        lr = 1e-3 * (step + 1) / WARM_UP if step < WARM_UP else 1e-4 + 4.5e-4 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = lr
        places = torch.randint(len(train) - CONTEXT, (BATCH, 1)) + torch.arange(CONTEXT + 1)
        windows = train[places]
        loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - begin
    nats = 0.0
    with torch.no_grad():
        for start in range(0, len(validation) - 1, CONTEXT):
            window = validation[start : start + CONTEXT + 1]
            nats += F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="sum").item()
    return {"seconds": seconds, "nats_per_byte": nats / (len(validation) - 1), "steps": STEPS}


def ours(text: Path, seed: int, seconds: float, folder: Path) -> dict:
    """Train as a user would; returns what metrics.json says."""
    run_dir = tempfile.mkdtemp(dir=folder)
    command = [sys.executable, "train.py", "experiment=shakespeare", "data=text", f"data.path={text}", f"seed={seed}"]
    command += [f"horizon={SHARE * seconds:.1f}s", f"data.cache={folder / 'cache'}", f"run_dir={run_dir}"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    facts = json.loads((Path(run_dir) / "metrics.json").read_text())
    return {
        "seconds": facts["train_seconds"],
        "nats_per_byte": facts["val_nats_per_byte"],
        "steps": facts["steps"],
    }


def row(name: str, figures: dict) -> list[str]:
    nats = figures["nats_per_byte"]
    return [name, f"{nats:.4f}", f"{nats / math.log(2):.4f}", f"{figures['seconds']:.1f}", f"{figures['steps']:.0f}"]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--text", type=Path, required=True)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--seconds", type=float, default=180.0)
    args = arguments.parse_args()
    text = args.text.read_text(encoding="utf-8")
    print(machine())
    found: dict[str, list[dict]] = {}
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for seed in range(1, args.seeds + 1):
            measured = {"peer": peer(text, seed)}
            time_of_peer = measured["peer"]["seconds"]
            budgets = {"ours, an eighth": time_of_peer / 8, "ours, its time": time_of_peer, "ours": args.seconds}
            for kind, seconds in budgets.items():
                measured[kind] = ours(args.text.resolve(), seed, seconds, Path(name))
            for kind, figures in measured.items():
                found.setdefault(kind, []).append(figures)
                rows.append(row(f"{kind}, seed {seed}", figures))
                print("  ".join(rows[-1]), flush=True)
    for kind, runs in found.items():
        keys = ("nats_per_byte", "seconds", "steps")
        rows.append(row(f"{kind}, median", {key: statistics.median(run[key] for run in runs) for key in keys}))
    print(table(["", "nats/byte", "bits/byte", "seconds", "steps"], rows))
    finish({"text": args.text.name, "runs": found}, args.json)


if __name__ == "__main__":
    main()
