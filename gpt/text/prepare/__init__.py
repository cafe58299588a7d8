"""From a text to token ids on disk."""
