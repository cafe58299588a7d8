"""Keys of nanoGPT, Hugging Face and Lightning, and what to write here instead."""

from gpt.console import quote

_STEP = "trainer.tokens_per_step, which counts all sequences of a step x model.context_length"
# What to write here, and the keys that people know for it; a key may be followed by its value.
_KEYS = {
    "horizon=Nsteps": "steps iters max_iters max_steps num_train_steps",
    "horizon=Nepochs": "epochs max_epochs num_train_epochs num_epochs",
    "horizon=Nmin": "max_time",
    _STEP: "batch_size per_device_train_batch_size train_batch_size gradient_accumulation_steps "
    "accumulate_grad_batches",
    "trainer.micro_batch_size": "device_batch_size",
    "model.context_length": "block_size n_ctx n_positions max_seq_length max_length",
    "model.num_layers": "n_layer num_hidden_layers",
    "model.num_heads": "n_head num_attention_heads",
    "model.d_model": "n_embd hidden_size",
    "model.dropout": "attn_pdrop embd_pdrop resid_pdrop hidden_dropout",
    "model.qkv_bias": "bias",
    "optim.lr, and optim.matrix_lr for Muon": "learning_rate",
    "optim.final_lr, a fraction of optim.lr": "min_lr",
    "optim.schedule": "lr_scheduler_type",
    "optim.warmup_steps": "warmup_iters",
    "optim.betas='[0.9,0.95]'": "beta1 beta2 adam_beta1 adam_beta2",
    "optim.clip": "grad_clip gradient_clip_val max_grad_norm",
    "leave it out, since the rates fall until the horizon": "lr_decay_iters",
    "optim=muon or optim=adamw": "optimizer",
    "trainer.validate_every": "eval_interval val_check_interval eval_steps",
    "data.validation_bytes, since each validation reads all of its text": "eval_iters limit_val_batches",
    "trainer.log_every": "log_interval log_every_n_steps logging_steps",
    "trainer.checkpoint_every": "save_steps",
    "trainer.precision=bf16, fp16 or fp32": "bf16 fp16 dtype",
    "trainer.device=cuda, mps or cpu": "accelerator",
    "trainer.devices": "nproc_per_node",
    "trainer.num_nodes": "nnodes",
    "trainer.compile": "torch_compile",
    "trainer.activation_checkpointing": "gradient_checkpointing",
    "logger='[tensorboard,wandb]'": "wandb_log wandb_project report_to",
    "run_dir": "out_dir default_root_dir output_dir",
    "resume=RUN": "ckpt_path resume_from_checkpoint",
    "init_from": "model_name_or_path",
    "data.path=FILE": "dataset train_file",
}
OTHER_TRAINERS = {theirs: ours for ours, keys in _KEYS.items() for theirs in keys.split()}


def quoted(override: str) -> str:
    """Quote an override for the shell, and its value, or each value of its list, for Hydra."""
    key, _, value = override.partition("=")
    mark = "'" if '"' in value else '"'
    listed = value.startswith("[") and value.endswith("]")
    values = ",".join(f"{mark}{part.strip()}{mark}" for part in (value[1:-1].split(",") if listed else [value]))
    return quote(f"{key}=[{values}]" if listed else f"{key}={values}")
