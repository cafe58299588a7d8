"""docs/loop.md quotes gpt/training/loop.py: each quoted line is in the file, in the same order."""

import re

import pytest

from harness import ROOT

PAGE = (ROOT / "docs/loop.md").read_text(encoding="utf-8")
QUOTES = re.findall(r"```py\n(.*?)```", PAGE, re.S)


def test_the_page_quotes_the_loop():
    assert len(QUOTES) >= 8


@pytest.mark.parametrize("quote", QUOTES, ids=lambda quote: quote.split()[0])
def test_quoted_lines_are_in_the_file_in_this_order(quote):
    lines = iter((ROOT / "gpt/training/loop.py").read_text(encoding="utf-8").splitlines())
    missing = [line for line in quote.splitlines() if line.strip() != "..." and line not in lines]
    assert missing == []
