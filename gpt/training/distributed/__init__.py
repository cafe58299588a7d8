"""Several processes, and weights split among them."""
