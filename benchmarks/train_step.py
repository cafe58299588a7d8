"""The training step against its peers: python benchmarks/train_step.py [--preset mini gpt2_small] [--json FILE].

Tokens a second, share of the matrix peak measured in the same run, and peak memory. Every variant takes the same steps
on the same random tokens, forward, backward and update, without a trainer. `naive` is a straightforward implementation
of the same model: fp32, the fused attention kernel, all logits at once, `torch.optim.Muon` and AdamW.
"""

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from measuring import Worker, finish, machine, matrix_peak, parser, table

from gpt.hardware import choose_compile, choose_device, keep_freed_memory
from gpt.model.chunked_loss import chunked_next_token_loss
from gpt.model.transformer import GPT, GPTConfig
from gpt.training.optim import OptimConfig, build_optimizer

PRESETS = {  # (context length, d_model, layers, heads), vocabulary, (B, T) of a step on a CPU and on a GPU
    "mini": ((128, 128, 4, 4), 1536, (8, 128), (64, 128)),
    "gpt2_small": ((1024, 768, 12, 12), 50257, (4, 256), (32, 1024)),
}


def tokens(preset: str, device: str, shape: tuple[int, int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, each (B, T)."""
    _, vocab_size, on_cpu, on_gpu = PRESETS[preset]
    shape = shape or (on_gpu if device == "cuda" else on_cpu)
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(vocab_size, shape, generator=generator).to(device) for _ in range(2))  # type: ignore[return-value]


def config_of(preset: str) -> GPTConfig:
    shape, vocab_size, _, _ = PRESETS[preset]
    return GPTConfig(*shape, vocab_size=vocab_size)


def ours(
    preset: str, dtype: str, optim: str, checkpointing: bool = False, shape: tuple[int, int] | None = None
) -> Callable[[], None]:
    keep_freed_memory()
    device = choose_device().type
    torch.manual_seed(0)
    model = GPT(config_of(preset)).compute_in(getattr(torch, dtype)).to(device)
    model.checkpointing = checkpointing
    if choose_compile("auto", torch.device(device)):
        for block in model.blocks:
            block.compile()
    weights, heads = dict(model.named_parameters()), model.config.num_heads
    optimizer = build_optimizer(weights, heads, OptimConfig(optim), torch.bfloat16)
    parameters = list(model.parameters())
    idx, targets = tokens(preset, device, shape)

    def step() -> None:
        chunked_next_token_loss(*model.hidden_and_head(idx), targets).backward()
        torch.nn.utils.get_total_norm([p.grad for p in parameters]).isfinite().item()
        optimizer.step()
        optimizer.zero_grad()

    return step


def naive(preset: str) -> Callable[[], None]:
    device = choose_device().type
    torch.manual_seed(0)
    model = GPT(config_of(preset)).to(device)
    for block in model.blocks:
        block.attention.fused_kernel = True
    matrices = [p for name, p in model.named_parameters() if name.startswith("blocks.") and p.dim() == 2]
    taken = set(map(id, matrices))
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02),
        torch.optim.AdamW([p for p in model.parameters() if id(p) not in taken], lr=0.003, fused=True),
    ]
    idx, targets = tokens(preset, device)

    def step() -> None:
        F.cross_entropy(model(idx).flatten(0, 1), targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def hugging_face(preset: str, autocast: bool) -> Callable[[], None]:
    from transformers import GPT2Config, GPT2LMHeadModel

    device = choose_device().type
    (context, width, layers, heads), vocab_size, _, _ = PRESETS[preset]
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    shape = {"n_positions": context, "n_embd": width, "n_layer": layers, "n_head": heads}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, use_cache=False, **shape, **none)).to(device).train()
    if choose_compile("auto", torch.device(device)):
        model = torch.compile(model)
    return with_adamw(
        model.parameters(), preset, autocast, lambda idx, targets: model(idx, labels=idx, shift_labels=targets).loss
    )


def litgpt(preset: str, autocast: bool) -> Callable[[], None]:
    from litgpt import GPT as LitGPT
    from litgpt import Config

    device = choose_device().type
    (context, width, layers, heads), vocab_size, _, _ = PRESETS[preset]
    shape = {"block_size": context, "n_embd": width, "n_layer": layers, "n_head": heads}
    model = LitGPT(Config(padded_vocab_size=vocab_size, vocab_size=vocab_size, bias=True, **shape)).to(device)
    if choose_compile("auto", torch.device(device)):
        model = torch.compile(model)
    return with_adamw(
        model.parameters(),
        preset,
        autocast,
        lambda idx, targets: F.cross_entropy(model(idx).flatten(0, 1), targets.flatten()),
    )


def with_adamw(parameters, preset: str, autocast: bool, loss: Callable) -> Callable[[], None]:
    """A peer's step as in its own training script: clipped gradient, fused AdamW."""
    device = choose_device().type
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    idx, targets = tokens(preset, device)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            value = loss(idx, targets)
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(preset: str, rounds: int, steps: int) -> dict:
    """Measure every variant in turn with the matrix peaks, and report."""
    bf16 = {"dtype": "bfloat16", "optim": "adamw"}
    variants: list[tuple[str, Callable, dict]] = [
        ("ours, bf16, AdamW", ours, bf16),
        ("ours, bf16, AdamW, checkpointing", ours, bf16 | {"checkpointing": True}),
        ("ours, bf16, Muon", ours, bf16 | {"optim": "muon"}),
        ("transformers, bf16 autocast", hugging_face, {"autocast": True}),
        ("transformers, fp32", hugging_face, {"autocast": False}),
    ]
    if importlib.util.find_spec("litgpt"):
        variants.append(("litgpt, bf16 autocast", litgpt, {"autocast": True}))
    if preset == "mini":  # with the large model, all variants together would take more than 24 GB
        variants += [("ours, fp32, AdamW", ours, bf16 | {"dtype": "float32"}), ("naive, fp32, Muon", naive, {})]
    workers = [Worker(name, make, preset=preset, **settings) for name, make, settings in variants]
    peaks = {dtype: Worker(dtype, matrix_peak, dtype=dtype, n=2048) for dtype in ("bfloat16", "float32")}
    found: dict[str, list[float]] = {dtype: [] for dtype in peaks}
    for worker in workers:
        worker.run(2)
        worker.times.clear()
    for _ in range(rounds):
        for dtype, worker in peaks.items():
            worker.run(1)
            found[dtype].append(worker.facts["flops"])
        for worker in workers:
            worker.run(steps)
    for worker in [*workers, *peaks.values()]:
        worker.close()
    return report(preset, workers, {dtype: sorted(values)[len(values) // 2] for dtype, values in found.items()})


def report(preset: str, workers: list[Worker], peaks: dict[str, float]) -> dict:
    """Print a preset's table; return its figures."""
    device = choose_device().type
    B, T = tokens(preset, device)[0].shape
    flops = GPT(config_of(preset)).flops_per_token(T) * B * T
    print(f"\n{preset}: {B} x {T} tokens, {flops / 1e9:.1f} GFLOP a step; "
          + ", ".join(f"{dtype} peak {peak / 1e9:,.0f} GFLOP/s" for dtype, peak in peaks.items()))  # fmt: skip
    first, rows, figures = workers[0].median, [], {}
    for worker in workers:
        share = flops / worker.median / peaks["bfloat16"]
        milliseconds, rate = f"{1000 * worker.median:,.1f}", f"{B * T / worker.median:,.0f}"
        ratio, peak = f"{worker.median / first:.2f}", f"{worker.peak / 1e9:.2f}"
        rows.append([worker.name, milliseconds, rate, ratio, f"{share:.1%}", peak])
        figures[worker.name] = {
            "ms": 1000 * worker.median,
            "tokens_per_second": B * T / worker.median,
            "time_to_ours": worker.median / first,
            "share_of_bf16_peak": share,
            "peak_bytes": worker.peak,
        }
    print(table(["", "ms", "tokens/s", "time / ours", "of bf16 peak", "GB at peak"], rows))
    return {"peaks": peaks, "batch": [B, T], "flops": flops, "variants": figures}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--preset", nargs="+", choices=list(PRESETS), default=list(PRESETS))
    arguments.add_argument("--rounds", type=int, default=7)
    args = arguments.parse_args()
    print(machine())
    reports = {}
    for preset in args.preset:
        reports[preset] = measure(preset, args.rounds, 10 if preset == "mini" else 1)
    finish(reports, args.json)


if __name__ == "__main__":
    main()
