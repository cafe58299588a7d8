"""Sampling from GPT-2 124M against its peers: python benchmarks/generate.py [--seconds 120] [--json FILE].

Models with random weights continue a prompt of 16 tokens greedily, one text or eight at once. A GPU also samples 64
texts at once. Figures are tokens a second over all texts. They are measured in turn with the speed at which this
machine reads memory. --only NAME ... selects the variants whose names contain one of these.

The peers are `transformers.generate` with its cache (in bf16 only if a CPU has more than AVX2) and llama.cpp with the
same weights and one text at a time (on a CPU, if llama-cpp-python and gguf are installed).
"""

import math
import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from measuring import Worker, describe_machine, format_table, make_parser, read_bandwidth, rounds, write_report

from gpt.data.tokenizer import gpt2_tokenizer
from gpt.hardware.device import choose_device
from gpt.interop import gguf
from gpt.model.transformer import GPT, GPTConfig
from gpt.sampling.generation import SamplingParams, generate
from gpt.sampling.packed import pack_weights

PROMPT = 16


def prompt(rows: int) -> torch.Tensor:
    return torch.randint(50257, (rows, PROMPT), generator=torch.Generator().manual_seed(0)).to(choose_device())


def ours(precision: str, rows: int, tokens: int, compiled: bool = False) -> Callable[[], None]:
    torch.manual_seed(0)
    model = pack_weights(GPT(GPTConfig(1024, 768, 12, 12)).to(choose_device()), precision, rows, compiled)
    idx = prompt(rows)

    def step() -> None:
        for _ in islice(generate(model, idx, tokens, SamplingParams(temperature=0.0)), tokens):
            pass

    return step


def hugging_face(dtype: str, rows: int, tokens: int) -> Callable[[], None]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config()).to(choose_device(), getattr(torch, dtype)).eval()
    idx = prompt(rows)
    options = {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": 50256}

    def step() -> None:
        with torch.inference_mode():
            model.generate(idx, attention_mask=torch.ones_like(idx), **options)

    return step


def llama_cpp(gguf_type: str, rows: int, tokens: int) -> Callable[[], list[int]]:
    from llama_cpp import Llama

    torch.manual_seed(0)
    ids, threads = prompt(rows)[0].tolist(), torch.get_num_threads()
    # On processors with AMX, version 0.3.36 crashes on several tokens at once. The prompt is then read once, untimed.
    one_at_a_time = gguf_type == "Q8_0" and torch.cpu._is_amx_tile_supported()
    start, batch = (PROMPT - 1, 1) if one_at_a_time else (0, 512)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        gguf.write_gguf(GPT(GPTConfig(1024, 768, 12, 12)), gpt2_tokenizer(), path, gguf_type.lower())
        model = Llama(str(path), n_ctx=1024, n_batch=batch, n_threads=threads, n_threads_batch=threads, verbose=False)
    model.eval(ids)

    def step() -> list[int]:
        model.n_tokens = start
        model.eval(ids[start:])
        new_ids = []
        for _ in range(tokens):
            # The binding's own lists of logits take ten times as long as the model.
            logits = np.ctypeslib.as_array(model._ctx.get_logits(), (GPTConfig.vocab_size,))
            new_ids.append(int(logits.argmax()))
            model.eval(new_ids[-1:])
        return new_ids

    return step


def main() -> None:
    arguments = make_parser(__doc__)
    arguments.add_argument("--tokens", type=int, default=50)
    arguments.add_argument("--seconds", type=float, default=120, help="of all turns")
    arguments.add_argument("--only", nargs="+", metavar="NAME")
    args = arguments.parse_args()
    print(describe_machine())
    on_cpu = choose_device().type == "cpu"
    variants: list[tuple[str, int, Callable, dict]] = []
    for rows in (1, 8) if on_cpu else (1, 8, 64):
        variants.append(("transformers, fp32", rows, hugging_face, {"dtype": "float32"}))
        if not (on_cpu and torch.backends.cpu.get_cpu_capability() == "AVX2"):  # AVX2 emulates bf16 in a minute a turn
            variants.append(("transformers, bf16", rows, hugging_face, {"dtype": "bfloat16"}))
        for compiled in (False, True) if on_cpu and rows == 1 else (False,):
            for precision in ("fp32", "bf16", "int8"):
                settings = {"precision": precision, "compiled": compiled}
                variants.append((f"ours, {precision}{', compiled' if compiled else ''}", rows, ours, settings))
        if on_cpu and rows == 1:
            for gguf_type in ("F32", "BF16", "Q8_0"):
                variants.append((f"llama.cpp, {gguf_type.lower()}", 1, llama_cpp, {"gguf_type": gguf_type}))
    memory = Worker("memory", read_bandwidth)
    speeds: list[float] = []
    workers: list[tuple[int, Worker]] = []
    for variant, rows, make, settings in variants:
        name = f"{variant}, {rows} at once"
        if args.only and not any(words in name for words in args.only):
            continue
        try:
            worker = Worker(name, make, rows=rows, tokens=args.tokens, **settings)
            worker.run(1)
            print(f"{name}: {rows * args.tokens / worker.times[0]:,.1f} tokens/s in the first turn")
        except SystemExit as error:
            print(f"left out: {' '.join(str(error).split())[-300:]}")
            continue
        worker.times.clear()
        workers.append((rows, worker))
    for _ in rounds(args.seconds):
        memory.run(1)
        speeds.append(memory.facts["bytes_per_second"])
        for _, worker in workers:
            worker.run(1)
    for worker in [memory, *(worker for _, worker in workers)]:
        worker.close()
    speed = sorted(speeds)[len(speeds) // 2]
    figures, rows_of_table = {}, []
    peers: dict[int, float] = {}  # the faster of the two precisions
    for rows, worker in workers:
        if worker.name.startswith("transformers"):
            peers[rows] = max(peers.get(rows, 0), rows * args.tokens / worker.median)
    for rows, worker in workers:
        rate = rows * args.tokens / worker.median
        ratio = rate / peers.get(rows, math.nan)
        rows_of_table.append([worker.name, f"{rate:,.1f}", f"{ratio:.2f}", f"{worker.peak / 1e9:.2f}"])
        figures[worker.name] = {
            "tokens_per_second": rate,
            "to_transformers": ratio,
            "peak_bytes": worker.peak,
        }
    print(
        f"memory reads at {speed / 1e9:.1f} GB/s, which allows {speed / 2 / 123.6e6:.0f} tokens/s of one text in bf16"
    )
    print(format_table(["", "tokens/s", "/ transformers", "GB at peak"], rows_of_table))
    write_report({"bytes_per_second": speed, "variants": figures}, args.json)


if __name__ == "__main__":
    main()
