"""The configuration of a run: its schema, how it is read, its schedule, and advice."""
