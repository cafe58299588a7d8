"""The network, and nothing else: attention, the transformer, its loss, and their faster twins."""
