"""Every test computes on one thread: the tensors here are tiny, and pytest itself uses all cores."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start, whose bits are compared with ours

import torch

torch.set_num_threads(1)
