"""The training step against its peers: python benchmarks/train_step.py [--preset mini gpt2_small] [--json FILE].

The variants take turns for --seconds (90) with each preset, in bf16 or fp32, as this machine trains.
--shape 2 128 is for 2 sequences of 128 tokens. --only NAME ... selects the variants whose names contain one of these.

Prints tokens a second, the fraction of the matrix peak measured in the same run, and peak memory. Every variant takes
the same steps on the same random tokens, forward, backward and update, without a trainer. `naive` is a straightforward
implementation of the same model: fp32, the fused attention kernel, all logits at once, `torch.optim.Muon` and AdamW.
`nanoGPT` is the recipe of nanoGPT's train.py.
A GPU may not hold all variants at once, so each takes turns with the first alone. Variants that fail are left out.
"""

import functools
import importlib.util
import math
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from measuring import (
    Worker,
    describe_machine,
    format_table,
    make_parser,
    matrix_peak,
    rounds,
    training_dtype,
    write_report,
)
from torch import nn

from gpt.hardware.device import choose_compile, choose_device, choose_precision
from gpt.hardware.memory import keep_freed_memory
from gpt.model.fast.chunked_loss import chunked_next_token_loss
from gpt.model.transformer import GPT, GPTConfig
from gpt.training.optim import OptimConfig, build_optimizer

PRESETS = {  # (context length, d_model, layers, heads), vocabulary, (B, T) of a step on a CPU and on a GPU
    "mini": ((128, 128, 4, 4), 1536, (8, 128), (64, 128)),
    "gpt2_small": ((1024, 768, 12, 12), 50257, (4, 256), (16, 1024)),
}
Shape = tuple[int, int] | None  # (B, T) of a step; None is the preset's for the device


def tokens(preset: str, device: str, shape: Shape = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets, each (B, T)."""
    _, vocab_size, on_cpu, on_gpu = PRESETS[preset]
    shape = shape or (on_gpu if device == "cuda" else on_cpu)
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(vocab_size, shape, generator=generator).to(device) for _ in range(2))  # type: ignore[return-value]


def make_config(preset: str) -> GPTConfig:
    shape, vocab_size, _, _ = PRESETS[preset]
    return GPTConfig(*shape, vocab_size=vocab_size)


def torch_loss(hidden: torch.Tensor, head_weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return PyTorch's own loss (torch 2.13), on a GPU in chunks. On a CPU, chunks take ten times as long as ours."""
    options = torch.nn.LinearCrossEntropyOptions() if hidden.is_cuda else None
    return F.linear_cross_entropy(
        hidden.flatten(0, 1), head_weight.to(hidden.dtype), targets.flatten(), options=options
    )


def ours(
    preset: str,
    dtype: str,
    optim: str,
    checkpointing: bool = False,
    shape: Shape = None,
    compiled: bool = True,
    loss: Callable | None = None,
    matmul: str = "high",
    waits: bool = False,
) -> Callable[[], None]:
    """Return our step, with our loss or another. On a GPU it is `compiled`, uses TF32, and never `waits` for a norm."""
    keep_freed_memory()
    device = choose_device().type
    if device == "cuda":
        torch.set_float32_matmul_precision(matmul)
    torch.manual_seed(0)
    model = GPT(make_config(preset)).set_compute_dtype(getattr(torch, dtype)).to(device)
    model.checkpointing = checkpointing
    if compiled and choose_compile("auto", torch.device(device)):
        model.compile_blocks()
    loss = loss or functools.partial(chunked_next_token_loss, compiled=model.is_compiled)
    weights, heads = dict(model.named_parameters()), model.config.num_heads
    trains_in_bf16 = choose_precision("auto", torch.device(device)) == "bf16"
    muon_dtype = torch.bfloat16 if trains_in_bf16 or dtype == "bfloat16" else torch.float32
    optimizer = build_optimizer(weights, heads, OptimConfig(optim).for_model(model.config), muon_dtype)
    parameters = list(model.parameters())
    idx, targets = tokens(preset, device, shape)

    def step() -> None:
        loss(*model.features_and_head(idx), targets).backward()
        finite = torch.nn.utils.get_total_norm([p.grad for p in parameters]).isfinite()
        if waits or device != "cuda":
            finite.item()
        optimizer.step()
        optimizer.zero_grad()

    return step


def naive(preset: str) -> Callable[[], None]:
    device = choose_device().type
    torch.manual_seed(0)
    model = GPT(make_config(preset)).to(device)
    for block in model.blocks:
        block.attention.fused_kernel = True
    matrices = [p for name, p in model.named_parameters() if name.startswith("blocks.") and p.dim() == 2]
    matrix_ids = set(map(id, matrices))
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02),
        torch.optim.AdamW([p for p in model.parameters() if id(p) not in matrix_ids], lr=0.003, fused=True),
    ]
    idx, targets = tokens(preset, device)

    def step() -> None:
        F.cross_entropy(model(idx).flatten(0, 1), targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


class NanoGPTBlock(nn.Module):
    """A block of nanoGPT, for C channels and H heads, without dropout and, as in its train.py, without biases."""

    def __init__(self, C: int, H: int):
        super().__init__()
        self.H = H
        self.norm_1 = nn.LayerNorm(C, bias=False)
        self.norm_2 = nn.LayerNorm(C, bias=False)
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.projection = nn.Linear(C, C, bias=False)
        self.expand = nn.Linear(C, 4 * C, bias=False)
        self.contract = nn.Linear(4 * C, C, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x (B, T, C) to (B, T, C)."""
        B, T, C = x.shape
        heads = [part.view(B, T, self.H, C // self.H).transpose(1, 2) for part in self.qkv(self.norm_1(x)).split(C, 2)]
        context = F.scaled_dot_product_attention(*heads, is_causal=True)  # (B, H, T, C / H)
        x = x + self.projection(context.transpose(1, 2).reshape(B, T, C))
        return x + self.contract(F.gelu(self.expand(self.norm_2(x))))


class NanoGPT(nn.Module):
    """nanoGPT's model. The vocabulary is padded to a multiple of 64, and embedding and head share their weight."""

    def __init__(self, context: int, C: int, num_layers: int, H: int, vocab_size: int):
        super().__init__()
        self.token_embedding = nn.Embedding(math.ceil(vocab_size / 64) * 64, C)
        self.position_embedding = nn.Embedding(context, C)
        self.blocks = nn.Sequential(*(NanoGPTBlock(C, H) for _ in range(num_layers)))
        self.final_norm = nn.LayerNorm(C, bias=False)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, 0.0, 0.02)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of idx (B, T) with all logits at once, a scalar."""
        positions = torch.arange(idx.shape[1], device=idx.device)
        x = self.blocks(self.token_embedding(idx) + self.position_embedding(positions))
        logits = F.linear(self.final_norm(x), self.token_embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def nanogpt(preset: str, autocast: bool, shape: Shape = None) -> Callable[[], None]:
    """Return the step of nanoGPT's train.py: autocast, one compiled graph of the whole model, TF32, fused AdamW."""
    device = choose_device().type
    torch.set_float32_matmul_precision("high" if device == "cuda" else "highest")
    sizes, vocab_size, _, _ = PRESETS[preset]
    torch.manual_seed(0)
    model = NanoGPT(*sizes, vocab_size).to(device)
    loss = torch.compile(model) if choose_compile("auto", torch.device(device)) else model
    return with_adamw(model.parameters(), preset, autocast, shape, loss)


def hugging_face(preset: str, autocast: bool, shape: Shape = None) -> Callable[[], None]:
    from transformers import GPT2Config, GPT2LMHeadModel

    device = choose_device().type
    torch.set_float32_matmul_precision("high" if device == "cuda" else "highest")
    (context, width, layers, heads), vocab_size, _, _ = PRESETS[preset]
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    size = {"n_positions": context, "n_embd": width, "n_layer": layers, "n_head": heads}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, use_cache=False, **size, **dropout)).to(device).train()
    if choose_compile("auto", torch.device(device)):
        model = torch.compile(model)
    return with_adamw(
        model.parameters(),
        preset,
        autocast,
        shape,
        lambda idx, targets: model(idx, labels=idx, shift_labels=targets).loss,
    )


def litgpt(preset: str, autocast: bool, shape: Shape = None) -> Callable[[], None]:
    from litgpt import GPT as LitGPT
    from litgpt import Config

    device = choose_device().type
    (context, width, layers, heads), vocab_size, _, _ = PRESETS[preset]
    size = {"block_size": context, "n_embd": width, "n_layer": layers, "n_head": heads}
    model = LitGPT(Config(padded_vocab_size=vocab_size, vocab_size=vocab_size, bias=True, **size)).to(device)
    if choose_compile("auto", torch.device(device)):
        model = torch.compile(model)
    return with_adamw(
        model.parameters(),
        preset,
        autocast,
        shape,
        lambda idx, targets: F.cross_entropy(model(idx).flatten(0, 1), targets.flatten()),
    )


def with_adamw(parameters, preset: str, autocast: bool, shape: Shape, loss: Callable) -> Callable[[], None]:
    """Return a peer's step as in its own training script: clipped gradient, fused AdamW."""
    device = choose_device().type
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    idx, targets = tokens(preset, device, shape)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            value = loss(idx, targets)
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def list_variants(preset: str) -> list[tuple[str, Callable, dict]]:
    """Return the name, the function and the settings of each variant."""
    defaults = {"dtype": training_dtype(), "optim": "adamw"}
    is_half = defaults["dtype"] != "float32"
    variants: list[tuple[str, Callable, dict]] = [
        ("ours, AdamW", ours, defaults),
        ("ours, Muon", ours, defaults | {"optim": "muon"}),
        ("ours, AdamW, checkpointing", ours, defaults | {"checkpointing": True}),
    ]
    for name, make in (("nanoGPT", nanogpt), ("transformers", hugging_face), ("litgpt", litgpt)):
        if make is nanogpt or importlib.util.find_spec(name):
            variants.append((f"{name}, autocast" if is_half else name, make, {"autocast": is_half}))
        else:
            print(f"left out: {name} is not installed")
    if is_half and preset == "mini":  # with the large model, all variants together would take more than 24 GB
        variants.append(("ours, fp32, AdamW", ours, defaults | {"dtype": "float32"}))
    if preset == "mini":
        variants.append(("naive, fp32, Muon", naive, {}))
    if choose_device().type == "cuda":
        if hasattr(F, "linear_cross_entropy"):
            variants.append(("ours, AdamW, torch's loss", ours, defaults | {"loss": torch_loss}))
        variants += [
            ("ours, AdamW, not compiled", ours, defaults | {"compiled": False}),
            ("ours, AdamW, waits for the norm", ours, defaults | {"waits": True}),
            ("ours, TF32, AdamW", ours, defaults | {"dtype": "float32"}),
            ("ours, fp32, AdamW, without TF32", ours, defaults | {"dtype": "float32", "matmul": "highest"}),
        ]
    return variants


def measure(preset: str, seconds: float, steps: int, shape: Shape, only: list[str] | None) -> dict:
    """Measure every variant in turn with the matrix peak, and report."""
    variants = [variant for variant in list_variants(preset) if not only or any(words in variant[0] for words in only)]
    groups = [variants]
    if choose_device().type != "cpu":
        groups = [[variant] for variant in variants]
    peak = Worker("peak", matrix_peak, dtype=training_dtype(), n=2048, seconds=1.0 if len(groups) == 1 else 0.1)
    peaks: list[float] = []
    workers: list[Worker] = []
    for group in groups:
        started = []
        try:
            for name, make, settings in group:
                extra = {} if make is naive else {"shape": shape}
                started.append(Worker(name, make, preset=preset, **settings, **extra))
                started[-1].run(1)
                started[-1].times.clear()
            for _ in rounds(seconds / len(groups)):
                peak.run(1)
                peaks.append(peak.facts["flops"])
                for worker in [*workers[:1], *started]:
                    worker.run(steps)
        except SystemExit as error:
            if len(groups) == 1 or not workers:
                raise
            print(f"left out: {' '.join(str(error).split())[-300:]}")
            continue
        workers += started
        for worker in started:
            print(f"{worker.name}: {1000 * worker.median:,.1f} ms")
            if workers[0] is not worker:
                worker.close()
    for worker in [workers[0], peak]:
        worker.close()
    return report(preset, workers, statistics.median(peaks), shape)


def report(preset: str, workers: list[Worker], peak: float, shape: Shape) -> dict:
    """Print a preset's table; return its figures."""
    device = choose_device().type
    B, T = tokens(preset, device, shape)[0].shape
    flops = make_config(preset).costs().flops_per_token(T) * B * T
    print(
        f"\n{preset}: {B} x {T} tokens in {training_dtype()}, {flops / 1e9:.1f} GFLOP a step, {peak / 1e9:,.0f} GFLOP/s"
    )
    first, rows, figures = workers[0].median, [], {}
    for worker in workers:
        fraction = flops / worker.median / peak
        milliseconds, rate = f"{1000 * worker.median:,.1f}", f"{B * T / worker.median:,.0f}"
        ratio, memory = f"{worker.median / first:.2f}", f"{worker.peak / 1e9:.2f}"
        rows.append([worker.name, milliseconds, rate, ratio, f"{fraction:.1%}", memory])
        figures[worker.name] = {
            "ms": 1000 * worker.median,
            "tokens_per_second": B * T / worker.median,
            "time_to_ours": worker.median / first,
            "share_of_peak": fraction,
            "peak_bytes": worker.peak,
        }
    print(format_table(["", "ms", "tokens/s", "time / ours", "of the peak", "GB of memory"], rows))
    return {"precision": training_dtype(), "peak": peak, "batch": [B, T], "flops": flops, "variants": figures}


def main() -> None:
    arguments = make_parser(__doc__)
    arguments.add_argument("--preset", nargs="+", choices=list(PRESETS), default=list(PRESETS))
    arguments.add_argument("--seconds", type=float, default=90, help="of each preset")
    arguments.add_argument("--shape", type=int, nargs=2, metavar=("B", "T"))
    arguments.add_argument("--only", nargs="+", metavar="NAME")
    args = arguments.parse_args()
    print(describe_machine())
    reports = {}
    for preset in args.preset:
        steps = 10 if preset == "mini" or choose_device().type == "cuda" else 1
        reports[preset] = measure(preset, args.seconds, steps, args.shape and tuple(args.shape), args.only)
    write_report(reports, args.json)


if __name__ == "__main__":
    main()
