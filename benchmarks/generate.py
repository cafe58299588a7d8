"""Sampling from GPT-2 124M against its peers: python benchmarks/generate.py [--tokens 100] [--json FILE].

Greedy continuations of a prompt of 16 tokens, random weights, by precision and by how many texts are made at once;
tokens a second of all texts together, in turn with the speed at which this machine reads memory. The peer is
`transformers.generate` with its cache.
"""

from collections.abc import Callable
from itertools import islice

import torch
from measuring import Worker, finish, machine, parser, read_bandwidth, table

from gpt.generation import Sampling, generate
from gpt.hardware import choose_device
from gpt.inference import prepare
from gpt.model import GPT, GPTConfig

PROMPT = 16


def prompt(rows: int) -> torch.Tensor:
    return torch.randint(50257, (rows, PROMPT), generator=torch.Generator().manual_seed(0)).to(choose_device())


def ours(precision: str, rows: int, tokens: int, compiled: bool = False) -> Callable[[], None]:
    torch.manual_seed(0)
    model = prepare(GPT(GPTConfig()).to(choose_device()), precision, rows, compiled)
    idx = prompt(rows)

    def step() -> None:
        for _ in islice(generate(model, idx, tokens, Sampling(temperature=0.0)), tokens):
            pass

    return step


def hugging_face(dtype: str, rows: int, tokens: int) -> Callable[[], None]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config()).to(choose_device(), getattr(torch, dtype)).eval()
    idx = prompt(rows)
    kind = {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": 50256}

    def step() -> None:
        with torch.inference_mode():
            model.generate(idx, attention_mask=torch.ones_like(idx), **kind)

    return step


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--tokens", type=int, default=100)
    arguments.add_argument("--rounds", type=int, default=5)
    args = arguments.parse_args()
    print(machine())
    wanted: list[tuple[str, int, Callable, dict]] = [("transformers, bf16", 1, hugging_face, {"dtype": "bfloat16"})]
    wanted += [("transformers, fp32", 1, hugging_face, {"dtype": "float32"})]
    wanted += [(f"ours, {precision}", 1, ours, {"precision": precision}) for precision in ("fp32", "bf16", "int8")]
    wanted += [
        (f"ours, {precision}, compiled", 1, ours, {"precision": precision, "compiled": True})
        for precision in ("bf16", "int8")
    ]
    wanted += [("transformers, bf16", 8, hugging_face, {"dtype": "bfloat16"})]
    wanted += [(f"ours, {precision}", 8, ours, {"precision": precision}) for precision in ("bf16", "int8")]
    memory = Worker("memory", read_bandwidth)
    speeds: list[float] = []
    workers = [
        (rows, Worker(f"{name}, {rows} at once", make, rows=rows, tokens=args.tokens, **settings))
        for name, rows, make, settings in wanted
    ]
    for _, worker in workers:
        worker.run(1)
        worker.times.clear()
    for _ in range(args.rounds):
        memory.run(1)
        speeds.append(memory.facts["bytes_per_second"])
        for _, worker in workers:
            worker.run(1)
    speed = sorted(speeds)[len(speeds) // 2]
    figures, rows_of_table = {}, []
    peers = {
        rows: rows * args.tokens / worker.median
        for rows, worker in workers
        if worker.name.startswith("transformers, bf16")
    }
    for rows, worker in workers:
        rate = rows * args.tokens / worker.median
        rows_of_table.append([worker.name, f"{rate:,.1f}", f"{rate / peers[rows]:.2f}", f"{worker.peak / 1e9:.2f}"])
        figures[worker.name] = {
            "tokens_per_second": rate,
            "to_transformers_bf16": rate / peers[rows],
            "peak_bytes": worker.peak,
        }
    print(
        f"memory is read at {speed / 1e9:.1f} GB/s: at most {speed / 2 / 123.6e6:.0f} tokens/s in bf16, one at a time"
    )
    print(table(["", "tokens/s", "to transformers bf16", "GB at peak"], rows_of_table))
    finish({"bytes_per_second": speed, "variants": figures}, args.json)


if __name__ == "__main__":
    main()
