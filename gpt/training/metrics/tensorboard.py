"""What a run tells TensorBoard at its start: its settings, and the charts of the CUSTOM SCALARS tab."""

from dataclasses import asdict

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard.summary import custom_scalars, hparams

from gpt.files import flatten
from gpt.training.config.schema import Config


def opening(config: Config) -> list[Summary]:
    """The summaries that belong at step 0."""
    settings = {key: str(v) if isinstance(v, list) else v for key, v in flatten(asdict(config)).items()}
    compared = dict.fromkeys(("val/loss", "val/bits_per_byte", "train/loss"))  # beside them in the HPARAMS tab
    return [*hparams(settings, compared), custom_scalars(layout(config))]


def layout(config: Config) -> dict[str, dict[str, list]]:
    """The charts of a run by category and title, most important first. A chart shows the tags that match its patterns.

    Charts that this run has no points for are left out. TensorBoard merges equal categories and charts of several runs.
    """
    charts: dict[str, dict[str, list[str]]] = {
        "Loss": {
            "loss, nats per token": ["train/loss$", "val/loss$"],
            "bits per byte, beside simple predictors": ["val/bits_per_byte$", "val_references/"],
        }
    }
    if config.data.name == "mix":
        charts["Corpora"] = {"bits per byte": ["val_corpora/"], "epochs": ["val_epochs/"]}
    charts["Updates"] = {"learning rates": ["train/lr$", "train/matrix_lr$"], "gradient norm": ["train/grad_norm$"]}
    if config.trainer.strategy != "fsdp":
        charts["Updates"]["update-to-weight ratio by layer"] = ["weights/update_ratio/"]
    if config.trainer.precision == "fp16":
        charts["Updates"]["loss scale"] = ["train/loss_scale$"]
    charts["Speed and memory"] = {
        "tokens per second": ["work/tokens_per_second$"],
        "peak memory, GiB": ["work/peak_memory_gib$"],
    }
    if config.data.prompts:
        charts["Samples"] = {"longest copied passage, characters": ["val_samples/longest_copy$"]}
    return {name: {title: ["Multiline", tags] for title, tags in group.items()} for name, group in charts.items()}
