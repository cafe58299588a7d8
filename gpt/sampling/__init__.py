"""From a model to text, and how likely a text is."""
