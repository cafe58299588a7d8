"""Every test computes on one thread, because the tensors are tiny and pytest itself uses all cores."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # of child processes: every bit depends on it

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def corpus_folder(tmp_path_factory):
    """Return a folder with corpus.txt, the tiny text of most trainings. Tests add runs and prepared text to it."""
    from harness import write_corpus  # imports Hydra and Lightning, and few tests need them

    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    return folder


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Return a folder with one run in runs/, of a tiny model that never ends a text."""
    from models import make_writer, write_run

    folder = tmp_path_factory.mktemp("project")
    write_run(folder / "runs" / "tiny", make_writer())
    return folder
