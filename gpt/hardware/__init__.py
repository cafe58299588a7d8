"""The machine: devices, memory and threads."""
