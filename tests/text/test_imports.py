"""Preparing a text and tokenizing it take no torch, which takes seconds to import."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "program",
    [
        "import gpt.text.prepare.prepare",
        "from gpt.text.tokenizer import gpt2_tokenizer; assert gpt2_tokenizer().encode('Hello') == [15496]",
    ],
    ids=["preparing", "tokenizing"],
)
def test_no_torch(program):
    """In a fresh process."""
    code = f"{program}\nimport sys; print([name for name in ('torch', 'lightning', 'requests') if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "[]\n"
