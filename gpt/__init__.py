"""A small, exact and fast GPT: attention, model, training step, exact resume and sampling."""
