"""Models in files: checkpoints, and other projects' formats."""
