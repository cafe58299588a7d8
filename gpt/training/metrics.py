"""Every metric of a run: its unit, and where it is shown.

A new metric needs an entry here, and code that computes it: in curves.py at each log point, or in validation.py at each
validation. Curves, TensorBoard's charts, metrics.csv, the closing report and `gpt.compare` read this table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Metric:
    """A figure of a run. Some have a value for each corpus, baseline or layer.

    Args:
        name: Its key in metrics.json, if it is measured at validations.
        unit: Empty for plain numbers.
        curve: Its curve, or the folder of its curves, which ends with a slash. Empty if it has none.
        chart: The chart in TensorBoard's CUSTOM SCALARS tab that draws the curve, beside others.
        label: Its row in the closing report, with `{}` for the corpus or baseline.
        column: Its column in the tables of `gpt.compare`, which is a mean over seeds.
        format: How the report and the tables print it.
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

# In the order of the report. TensorBoard opens the first two folders of curves, so others sort after `train` and `val`.
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


def curve_points(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the points of metrics that have curves: names of curves to numbers.

    Args:
        values: By the names of metrics: a number, or a number for each corpus, baseline or layer.

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
    """Return the charts of several curves: titles to the patterns that the names of their curves match."""
    charts: dict[str, list[str]] = {}
    for metric in METRICS.values():
        if metric.chart:
            end = "" if metric.curve.endswith("/") else "$"
            charts.setdefault(metric.chart, []).append(metric.curve + end)
    return charts
