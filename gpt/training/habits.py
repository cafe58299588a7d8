"""Keys and values that people know from nanoGPT, Hugging Face and Lightning, and what to write here instead."""

import math
import os
import re
from typing import Any

from gpt.errors import quote

# What to write here | whose keys it replaces. {n} stands for a whole number of the user's, {v} for any value.
_TABLE = """
horizon={n}steps | nanoGPT: max_iters | Hugging Face: max_steps num_train_steps
horizon={v}epochs | Lightning: max_epochs | Hugging Face: num_train_epochs num_epochs
horizon, with the unit of a time, such as 90min | Lightning: max_time
{tokens} | nanoGPT: batch_size | Hugging Face: per_device_train_batch_size train_batch_size
{tokens} | nanoGPT: gradient_accumulation_steps | Lightning: accumulate_grad_batches
trainer.micro_batch_size={n} | nanochat: device_batch_size
model.context_length={n} | nanoGPT: block_size | Hugging Face: n_ctx n_positions max_seq_length max_length
model.num_layers={n} | nanoGPT: n_layer | Hugging Face: num_hidden_layers
model.num_heads={n} | nanoGPT: n_head | Hugging Face: num_attention_heads
model.d_model={n} | nanoGPT: n_embd | Hugging Face: hidden_size
model.dropout={v} | nanoGPT: dropout | Hugging Face: attn_pdrop embd_pdrop resid_pdrop hidden_dropout
model.qkv_bias={v} | nanoGPT: bias
optim.lr={v} with optim=adamw, as Muon's rate is optim.matrix_lr | nanoGPT: learning_rate
optim.final_lr, a fraction of optim.lr | nanoGPT: min_lr
optim.schedule={v} | Hugging Face: lr_scheduler_type
optim.warmup_steps={n} | nanoGPT: warmup_iters | Hugging Face: warmup_steps
optim.weight_decay={v} | nanoGPT: weight_decay
optim.betas='[0.9,0.95]' for both | nanoGPT: beta1 beta2 | Hugging Face: adam_beta1 adam_beta2
optim.clip={v} | nanoGPT: grad_clip | Lightning: gradient_clip_val | Hugging Face: max_grad_norm
leave it out, as the rates fall until the horizon | nanoGPT: lr_decay_iters
optim={v} | PyTorch: optimizer
trainer.validate_every={n} | nanoGPT: eval_interval | Lightning: val_check_interval | Hugging Face: eval_steps
data.validation_bytes, as each validation reads all of its text | nanoGPT: eval_iters | Lightning: limit_val_batches
trainer.log_every={n} | nanoGPT: log_interval | Lightning: log_every_n_steps | Hugging Face: logging_steps
trainer.checkpoint_every={n} | Hugging Face: save_steps
trainer.precision=bf16 | Hugging Face: bf16
trainer.precision=fp16 | Hugging Face: fp16
trainer.precision={v} | nanoGPT: dtype | Lightning: precision
trainer.device={v} | nanoGPT: device | Lightning: accelerator
trainer.devices={n} | torchrun: nproc_per_node
trainer.num_nodes={n} | torchrun: nnodes
trainer.compile={v} | nanoGPT: compile | Hugging Face: torch_compile
trainer.activation_checkpointing={v} | Hugging Face: gradient_checkpointing
logger='[tensorboard,wandb]' | nanoGPT: wandb_log wandb_project | Hugging Face: report_to
run_dir={v} | nanoGPT: out_dir | Lightning: default_root_dir | Hugging Face: output_dir
resume={v} | Lightning: ckpt_path | Hugging Face: resume_from_checkpoint
init_from={v} | Hugging Face: model_name_or_path
data=text data.path={v} | nanoGPT: dataset | Hugging Face: train_file
"""
_THEIRS = {
    name: (origin.strip(), ours)
    for ours, *columns in (row.split(" | ") for row in _TABLE.strip().splitlines())
    for origin, _, names in (column.partition(":") for column in columns)
    for name in names.split()
}
_PRECISIONS = {
    "bf16": "bf16-mixed bf16-true bfloat16",
    "fp16": "16 16-mixed 16-true float16",
    "fp32": "32 32-true float32",
}
_VALUES = {  # of our own keys
    "trainer.precision": {
        theirs: f"trainer.precision={ours}" for ours, names in _PRECISIONS.items() for theirs in names.split()
    },
    "trainer.device": {"gpu": "trainer.device=cuda"},
    "init_from": {"scratch": "leave it out", "resume": "resume=RUN"},
}


_WITH_A_VALUE = ("--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp", "--package", "-p")  # Hydra's


def rewritten(arguments: list[str], unknown: list[str], ours: list[str]) -> list[str]:
    """The command line as Hydra takes it: `--seed 3` as `seed=3`, and overrides last.

    Keys of other trainers are written so that Hydra adds them, for `advice` to find: `++batch_size=12`. `unknown` holds
    the words that look like options and are none of Hydra's, and `ours` every key of the configuration.
    """
    result: list[list[str]] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        name, equals, value = word.lstrip("+-").partition("=")
        if word.startswith("--") and word in unknown:
            if not equals:
                value = words.pop(0) if words and re.fullmatch(r"-?[\d.]+\S*|[^-+=~][^=]*", words[0]) else "true"
            name = name.replace("-", "_")
            is_ours = any(key == name or key.startswith(f"{name}.") for key in [*ours, "experiment"])
            word = f"{name}={value}" if is_ours else f"++{name}={value}"
        elif equals and _is_theirs(name, ours):
            word = f"++{name}={value}"
        elif value.startswith("~"):  # which no shell expands after a key with a dot
            word = f"{word.removesuffix(value)}{os.path.expanduser(value)}"
        result.append([word, words.pop(0)] if word in _WITH_A_VALUE and words else [word])
    result.sort(key=lambda unit: "=" in unit[0] and not unit[0].startswith("-"))
    return [word for unit in result for word in unit]


def quoted(override: str) -> str:
    """An override as a word for the shell, its value, or each value of its list, in quotes for Hydra."""
    key, _, value = override.partition("=")
    mark = "'" if '"' in value else '"'
    listed = value.startswith("[") and value.endswith("]")
    values = [f"{mark}{part.strip()}{mark}" for part in (value[1:-1].split(",") if listed else [value])]
    return quote(f"{key}=[{','.join(values)}]" if listed else f"{key}={values[0]}")


def advice(plain: dict[str, Any], ours: list[str]) -> str:
    """One line on every key and value of a composed configuration that comes from elsewhere; empty if none does."""
    flat = leaves(plain)
    numbers = {key.split(".")[-1]: value for key, value in flat.items() if _is_theirs(key, ours)}
    context = next((n for name, n in numbers.items() if _THEIRS[name][1].startswith("model.context_length")), None)
    tokens = _tokens(numbers, context or flat.get("model.context_length"))
    lines: dict[str, str] = {}  # by what is advised, so that nothing is advised twice
    for key, value in flat.items():
        if _is_theirs(key, ours):
            origin, template = _THEIRS[key.split(".")[-1]]
            whole = re.fullmatch(r"([1-9]\d*)(\.0)?", str(value))
            new = template.format(n=whole[1] if whole else "N", v="..." if value is None else value, tokens=tokens)
            new = _VALUES.get(template.partition("=")[0], {}).get(str(value), new)
            lines.setdefault(new, f"there is no key {key!r} ({origin}): {new}")
        elif new := _VALUES.get(key, {}).get(str(value), ""):
            lines.setdefault(new, f"{key}={value} is not known here: {new}")
    return "; ".join(lines.values())


def _tokens(numbers: dict[str, Any], context: Any) -> str:
    """How many tokens a step of these numbers of sequences has."""
    sequences = [n for name, n in numbers.items() if _THEIRS[name][1] == "{tokens}"]
    if any("batch_size" in name for name in numbers) and all(isinstance(n, int) for n in [*sequences, context]):
        tokens, counted = math.prod([*sequences, context]), " x ".join(map(str, sequences))
        return f"trainer.tokens_per_step={tokens}, which is {counted} sequences x model.context_length={context}"
    return "trainer.tokens_per_step, which is all sequences of a step x model.context_length"


def _is_theirs(key: str, ours: list[str]) -> bool:
    return key.split(".")[-1] in _THEIRS and key not in ours


def leaves(plain: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested dictionaries by their keys with dots."""
    found: dict[str, Any] = {}
    for name, value in plain.items():
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found
