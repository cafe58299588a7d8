"""The figures of a run: curves, metrics.json, loggers, and the closing report."""
