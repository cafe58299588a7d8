"""Every test runs on one thread: the tensors here are tiny, and threads would only wait for each other."""

import torch

torch.set_num_threads(1)
