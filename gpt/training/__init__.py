"""From batches to a trained run."""
