"""python -m gpt.tokens: how a text splits, and whether prepared tokens are what they were."""

import sys

import harness
from gpt import tokens
from gpt.data.chunking import split_into_chunks
from gpt.data.tokenizer import byte_tokenizer, gpt2_tokenizer
from harness import set_stdin

GPT2, BYTE = gpt2_tokenizer(), byte_tokenizer()


def output(capsys, *arguments: str) -> str:
    """Run the command in this process and return what it prints; stderr must stay empty."""
    tokens.main(list(arguments))
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def refusal(*arguments: str) -> str:
    """The one line with which the command refuses."""
    return harness.refusal(tokens.main, list(arguments))


GREETING = "Hello, naïve 世界!"
GREETED = f"""\
Hello│,│·naïve│·│<e4><b8>│<96>│<e7><95>│<8c>│!

 15496  48 65 6c 6c 6f           Hello
    11  2c                       ,
 41492  20 6e 61 c3 af 76 65     ·naïve
   220  20                       ·
 10310  e4 b8                    <e4><b8>
   244  96                       <96>
 45911  e7 95                    <e7><95>
   234  8c                       <8c>
     0  21                       !

9 tokens, 21 bytes, 16 characters: 2.33 bytes per token; vocabulary 50,257, sha256 {GPT2.sha256[:12]}...
"""


def test_shows_a_text(capsys, monkeypatch, tmp_path):
    """The text with its borders, each token with its bytes, and the counts; from any source."""
    assert output(capsys, "--text", GREETING) == GREETED
    assert output(capsys, "gpt2", "--text", GREETING) == GREETED
    (tmp_path / "text").write_text(GREETING, encoding="utf-8")
    assert output(capsys, "--file", str(tmp_path / "text")) == GREETED
    set_stdin(monkeypatch, f"\ufeff{GREETING}".encode())  # its mark is no text
    assert output(capsys) == GREETED
    (tmp_path / "text").write_text(GREETING, encoding="utf-8-sig")
    assert output(capsys, "--file", str(tmp_path / "text")) == GREETED


def test_shows_what_cannot_be_seen(capsys):
    """White space as signs, a line's end also as one; control characters never reach the terminal."""
    out = output(capsys, "byte", "--text", "a\tb \n\n\x1b[31m\r\u200b€")
    assert out.split("\n\n")[0] == ("a│→│b│·│⏎│\n⏎│\n<1b>│[│3│1│m│<0d>│<e2>│<80>│<8b>│<e2>│<82>│<ac>")
    assert "\n    10  0a                       ⏎\n    27  1b                       <1b>\n" in out
    assert "\x1b" not in out
    assert tokens.show_token("x\u3000é€\n\n\x85".encode() + b"\xe2\x82") == "x<e3><80><80>é€⏎\n⏎\n<c2><85><e2><82>"


def test_counts(capsys):
    """One is one, thousands have commas, and nothing has no ratio. Up to forty tokens are also listed."""
    known = f"vocabulary 257, sha256 {BYTE.sha256[:12]}...\n"
    assert output(capsys, "byte", "--text", "") == f"0 tokens, 0 bytes, 0 characters; {known}"
    out = output(capsys, "byte", "--text", "a")
    assert (
        out == f"a\n\n    97  61                       a\n\n1 token, 1 byte, 1 character: 1.00 bytes per token; {known}"
    )
    out = output(capsys, "byte", "--text", "é" * 1009)
    assert out.endswith(f"│<c3>│<a9>│...\n\n2,018 tokens, 2,018 bytes, 1,009 characters: 1.00 bytes per token; {known}")
    assert output(capsys, "byte", "--text", "a" * 40).count("\n    97  61 ") == 40
    assert output(capsys, "byte", "--text", "a" * 41).count("\n") == 3


def test_takes_a_long_text_in_pieces(capsys, tmp_path):
    """A thousand tokens are shown, and all are counted, from piece to piece and from block to block of bytes."""
    text = "€ and seven words\n" * 29_989
    assert len(list(split_into_chunks([text]))) == 5
    file = tmp_path / "long"
    file.write_text(text, encoding="utf-8")
    shown, _, last = output(capsys, "--file", str(file)).rpartition("\n\n")
    assert shown == "€│·and│·seven│·words│⏎│\n" * 200 + "..."
    assert last.startswith("149,945 tokens, 599,780 bytes, 539,802 characters: 4.00 bytes per token")


def test_refusals(monkeypatch, tmp_path):
    """Each mistake is one line that names the value and the remedy."""
    choices = "choose gpt2, byte, or the path of a run, a checkpoint, a Hugging Face GPT-2 or a prepared corpus"
    assert f"'gpt3' is not a tokenizer: {choices}" in refusal("gpt3", "--text", "a")
    assert "missing: cannot be read (No such file" in refusal("--file", str(tmp_path / "missing"))
    assert "see python -m gpt.tokens --help" in refusal("--tex", "a")
    assert "a folder without checkpoints" in refusal(str(tmp_path), "--text", "a")
    (tmp_path / "file").write_bytes(
        b"a" * 65_535 + b"\xe2\x82" + b"\xffb"
    )  # the character begins in one block of bytes
    assert "file: not UTF-8 (byte 0xe2 at offset 65535)" in refusal("--file", str(tmp_path / "file"))
    assert "file: not a checkpoint of this project" in refusal(str(tmp_path / "file"), "--text", "a")
    set_stdin(monkeypatch, "é".encode()[:1])
    assert "standard input: not UTF-8 (byte 0xc3 at offset 0)" in refusal("byte")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert "there is no text: give --text TEXT or --file FILE, or pipe one in" in refusal()


def test_takes_arguments_that_are_not_utf8(capsys):
    """Python hands them on as lone surrogates: they are shown as U+FFFD."""
    assert output(capsys, "byte", "--text", "a\udcff").startswith("a│<ef>│<bf>│<bd>\n\n")
