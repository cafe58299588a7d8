"""All metrics of a run, with their units, curves and labels.

A new metric needs an entry here, and a line that computes it: in `write_point` of metric_logger.py for each log point,
or in validation.py for each validation (`_score_metrics` with a curve, `_training_metrics` without). The curves,
TensorBoard's charts, metrics.csv, the closing report and `gpt.compare` use this table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Metric:
    """A number that describes a run, or a number for each corpus, baseline or layer.

    Args:
        name: The key in metrics.json, if the metric is measured at validations.
        unit: Empty for plain numbers.
        curve: The name of the curve; empty if there is none. A name that ends with a slash is a folder of curves.
        chart: The chart in TensorBoard's CUSTOM SCALARS tab that contains the curve.
        label: The row in the closing report, with `{}` for the corpus or baseline; empty for no row.
        column: The column in the tables of `gpt.compare`; empty for no column.
        format: The format in the report and the tables.
    """

    name: str
    unit: str
    curve: str = ""
    chart: str = ""
    label: str = ""
    column: str = ""
    format: str = ".4f"


NATS, BITS = "nats per token", "bits per byte"
RATES, UPDATES = "learning rates", "update-to-weight ratio by layer"

# In the order of the report. TensorBoard opens the first two folders of curves in alphabetical order, so the names of
# all other folders sort after `train` and `val`.
METRICS = {
    metric.name: metric
    for metric in (
        Metric("steps", "steps", label="trained", column="steps", format=".0f"),
        Metric("tokens", "tokens"),
        Metric("epochs", "epochs"),
        Metric("train_seconds", "seconds", label="time", column="seconds", format=".1f"),
        Metric("tokens_per_second", "tokens/s", "work/tokens_per_second"),
        Metric("mfu", "fraction of the device's peak", "work/mfu"),
        Metric("peak_memory_bytes", "bytes"),
        Metric("peak_memory_gib", "GiB", "work/peak_memory_gib"),
        Metric("parameters", "parameters"),
        Metric("train_loss", NATS, "train/loss", chart=NATS, label="training loss"),
        Metric("val_loss", NATS, "val/loss", chart=NATS, label="validation loss"),
        Metric("best_val_loss", NATS, label="best validation"),
        Metric("best_step", "step"),
        Metric("val_nats_per_byte", "nats per byte"),
        Metric("val_bits_per_byte", BITS, "val/bits_per_byte", chart=BITS, label="validation"),
        Metric("expected_bits_per_byte", BITS, label="  expected"),
        Metric("corpus_bits_per_byte", BITS, "val_corpora/", chart=BITS, label="  {}"),
        Metric("corpus_epochs", "epochs", "val_epochs/"),
        Metric("baselines", BITS, "val_baselines/", chart=BITS, label="  {}"),
        Metric("beaten_at_step", "step"),
        Metric("longest_copy", "characters", "val_samples/longest_copy"),
        Metric("lr", "", "train/lr", chart=RATES),
        Metric("matrix_lr", "", "train/matrix_lr", chart=RATES),
        Metric("loss_scale", "", "train/loss_scale"),
        Metric("skipped_steps", "steps", "train/skipped_steps"),
        Metric("grad_norm", "", "weights/grad_norm"),
        Metric("update_ratio", "fraction of the norm", "weights/update_ratio/", chart=UPDATES),
    )
}

# Settings that do not affect the model. TensorBoard's HPARAMS tab and `gpt.compare` leave them out.
SETTINGS_WITHOUT_EFFECT = {"run_dir", "logger", "data.cache", "data.cache_bytes", "data.prompts"}


def curve_points(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the names of curves to their new values.

    Args:
        values: Names of metrics to numbers, or to dictionaries of numbers for each corpus, baseline or layer.

    Raises:
        KeyError: A metric is not in `METRICS`.
    """
    points: dict[str, float] = {}
    for name, value in values.items():
        curve = METRICS[name].curve
        if curve.endswith("/"):
            points |= {f"{curve}{part}": number for part, number in value.items()}
        elif curve:
            points[curve] = value
    return points


def chart_patterns() -> dict[str, list[str]]:
    """Return the charts of several curves: titles to patterns for the names of their curves."""
    charts: dict[str, list[str]] = {}
    for metric in METRICS.values():
        if metric.chart:
            end = "" if metric.curve.endswith("/") else "$"
            charts.setdefault(metric.chart, []).append(metric.curve + end)
    return charts
