"""What the machine offers: devices, memory and threads."""
