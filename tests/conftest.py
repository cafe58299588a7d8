"""Every test computes on one thread: the tensors here are tiny, and pytest itself uses all cores."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start, whose bits are compared with ours

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def corpus_folder(tmp_path_factory):
    """A folder with corpus.txt, the tiny text of most trainings here; runs and prepared text may be added to it."""
    from harness import write_corpus  # here, because it imports Hydra and Lightning, which few tests need

    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    return folder


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder whose runs/ holds one run, of the tiny model that never ends a text."""
    from small_models import make_writer, write_run

    folder = tmp_path_factory.mktemp("project")
    write_run(folder / "runs" / "tiny", make_writer())
    return folder
