"""Preparing a text and tokenizing it take no torch, which takes seconds to import."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_torch():
    """In a fresh process."""
    code = """if True:
        import sys
        import gpt.data.prepare
        from gpt.data.tokenizer import gpt2_tokenizer
        assert gpt2_tokenizer().encode("Hello") == [15496]
        print([name for name in ("torch", "lightning", "requests") if name in sys.modules])
    """
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "[]\n"
