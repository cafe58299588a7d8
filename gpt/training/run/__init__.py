"""A run directory, and what is recorded of a run."""
