"""The network: attention, the transformer, its loss, and fast twins of each."""
