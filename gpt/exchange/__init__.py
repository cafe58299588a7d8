"""What enters and leaves: checkpoints and other projects' formats."""
