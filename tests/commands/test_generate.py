"""generate.py as people use it: processes for streams and signals, calls in this process for the rest."""

import contextlib
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import generate
import gpt.sampling.generation
import harness
from gpt.sampling.arguments import parse_arguments, unescape
from gpt.sampling.generation import SamplingParams
from gpt.sampling.packed import pack_weights
from harness import set_stdin
from models import EOT, WRITER_SHAPE, make_writer, write_run

PROGRAM = Path(generate.__file__).resolve()
NOTE = r"generate\.py: sampling .+ with seed \d+\n"  # on stderr before each text
CONTEXT = WRITER_SHAPE.context_length
GREEDY = ["--temperature", "0"]


@pytest.fixture(autouse=True)
def in_project(project, monkeypatch) -> None:
    """Make the project the current folder, so that its only run is the newest."""
    monkeypatch.chdir(project)


@torch.no_grad()
def expected_text(prompt: bytes, new: int) -> str:
    """Return the greedy text of a slow loop: the whole window goes through the model for every token."""
    model = make_writer()
    idx = torch.tensor([(list(prompt) or [EOT])[-CONTEXT:]])
    start = idx.shape[1]
    for _ in range(new):
        idx = torch.cat([idx, model(idx[:, -CONTEXT:])[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert EOT not in idx[0, start:]
    return bytes(idx[0, start:].tolist()).decode("utf-8", "replace")


def output(capsys, *arguments: str) -> str:
    """Return what generate.py prints on stdout. Stderr must have its note and nothing else."""
    generate.main(list(arguments))
    printed = capsys.readouterr()
    assert re.fullmatch(NOTE, printed.err)
    return printed.out


def samples(capsys, *arguments: str) -> list[dict]:
    """Return the samples that generate.py prints with --json."""
    return json.loads(output(capsys, "--json", *arguments))["samples"]


def greedy_text(capsys, *arguments: str) -> str:
    """Return the greedy continuation of 23 tokens."""
    (sample,) = samples(capsys, *GREEDY, "--max-new-tokens", "23", *arguments)
    assert (sample["tokens"], sample["finish_reason"]) == (23, "length")
    return sample["text"]


def refusal(capsys, *arguments: str) -> str:
    """Return the line of a refusal. Stderr has the note if only the model shows the mistake."""
    line = harness.refusal(generate.main, list(arguments))
    assert re.fullmatch(f"({NOTE})?", capsys.readouterr().err)
    return line


@contextlib.contextmanager
def started(folder: Path, *arguments: str) -> Iterator[subprocess.Popen]:
    """Start generate.py in a folder. Its output is a pipe with a buffer, whatever the environment sets."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, PROGRAM, *arguments]
    with subprocess.Popen(command, cwd=folder, env=environment, bufsize=0, **streams) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_closed_pipe_ends_the_program_quietly(project):
    """As with `| head -c 5`: it ends long before its text would."""
    with started(project, "--prompt", "2 3 5 7", "--max-new-tokens", "1000000") as process:
        assert process.stdout.read(5) == b"2 3 5"
        process.stdout.close()
        assert process.wait(timeout=60) == 0
        assert re.fullmatch(NOTE, process.stderr.read().decode())


def test_text_is_streamed_until_ctrl_c(project):
    """The exit code is 130, and nothing is printed after the signal."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit "ignore"
    try:
        with started(project, "--prompt", "2 3 5 7 ", "--max-new-tokens", "1000000") as process:
            text = b"".join(process.stdout.read(1) for _ in range(53))
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            rest, error = process.communicate(timeout=60)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert process.returncode == 130
    assert re.fullmatch(NOTE, error.decode())
    assert text.startswith(b"2 3 5 7 ")
    assert len(text + rest) < 8000  # a buffer that is not flushed holds 8,192 bytes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "temperature=-1.0 .* at least 1e-06 and at most 100"),
        (["--slide", "18"], "slide=18 .* at most 17"),
        (["--top-logprobs", "101"], "--top-logprobs=101 .* at least 0 and at most 100"),
        (["--keep-context"], "--keep-context .*--interactive"),
        (["--tempo", "1"], "--tempo 1; see .*--help"),
        (["--prompt-file", "none.txt"], "--prompt-file: .* --prompt"),
        (["--checkpoint", "nowhere"], "nowhere: there is no such checkpoint"),
        (["--insight", "page.html", "--json"], "--interactive, --json, and --check or --insight .* one of them"),
        (["--compile", "--prompt", "b"], "--insight and --compile .* give one prompt"),
        (["--compile", "--precision", "fp16"], "--compile .* fp32, bf16 and int8: leave it out"),
        (["--insight", "no/page.html"], "--insight=no/page.html .* name a file in a folder that exists"),
        (["--insight", "."], r"--insight=\. .* name a file in a folder that exists"),
        (["--check"], "--check: .*: leave --check out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistaken_option_is_refused_in_one_line(capsys, arguments, message):
    """The line names the option, its value and what to do."""
    line = refusal(capsys, "--prompt", "a", *arguments)
    assert re.search(message, line), line


def test_help_names_every_default(capsys):
    with pytest.raises(SystemExit) as end:
        generate.main(["--help"])
    options = re.split(r"^  (?=--)", capsys.readouterr().out, flags=re.M)[1:]
    assert end.value.code == 0
    assert len(options) > 20
    assert [option for option in options if "default: " not in " ".join(option.split())] == []


def test_a_prompt_that_cannot_be_read_is_refused(tmp_path, monkeypatch, capsys):
    """The line has the file and the reason. In a text that is not UTF-8, it has the first bad byte and its position."""
    for name, reason in (("none.txt", "No such file"), ("a" * 300, "File name too long"), (".", "Is a directory")):
        line = refusal(capsys, "--prompt-file", name)
        assert f"{name}: cannot be read ({reason}" in line and line.endswith("fix that, or move the file away")
    file = tmp_path / "latin-1.txt"
    file.write_bytes("2 3 5 é 7".encode("latin-1"))
    assert f"{file}: not UTF-8 (byte 0xe9 at offset 6)" in refusal(capsys, "--prompt-file", str(file))
    set_stdin(monkeypatch, "23é".encode()[:-1])
    assert "standard input: not UTF-8 (byte 0xc3 at offset 2)" in refusal(capsys)


def test_a_model_whose_logits_overflow_is_refused(tmp_path, capsys):
    """All its weights are finite. The same holds for greedy text with log-probabilities."""
    model = make_writer()
    with torch.no_grad():
        model.final_norm.bias.fill_(3e38)
    arguments = ["--prompt", "a", "--checkpoint", str(write_run(tmp_path / "run", model))]
    for more in ([], [*GREEDY, "--top-logprobs", "2", "--json"]):
        assert "logits are not finite, so it is damaged" in refusal(capsys, *arguments, *more)


def test_insight_page_has_the_printed_tokens(capsys, tmp_path):
    """A second page replaces the first."""
    page = tmp_path / "page.html"
    for prompt in ("ab", ""):
        generate.main(["--prompt", prompt, "--max-new-tokens", "7", "--seed", "3", "--insight", str(page)])
        printed = capsys.readouterr()
        assert f"wrote {page} ({page.stat().st_size:,} bytes)" in printed.err.splitlines()[-1]
        data = json.loads(re.findall(r'id="data">(.*?)</script>', page.read_text())[0])
        length = data["given"]
        assert length == max(1, len(prompt))
        assert printed.out == prompt + bytes(data["tokens"][length:]).decode("utf-8", "replace") + "\n"
        assert (len(data["tokens"]), data["facts"]["seed"], data["facts"]["top_p"]) == (length + 7, 3, 0.95)
    assert list(tmp_path.iterdir()) == [page]


def test_json_reproduces_the_text(capsys):
    """The object holds all settings. The same seed without --json gives the same text."""
    arguments = ["--prompt", "2 3 5 é\n", "--max-new-tokens", "11", "--top-k", "31", "--repetition-penalty", "1.5"]
    printed = json.loads(output(capsys, "--json", *arguments, "--num-samples", "2", "--seed", "7"))
    texts, speed = printed.pop("samples"), printed.pop("tokens_per_second")
    assert printed == {
        "checkpoint": str(Path("runs/tiny/checkpoints/best.ckpt")),
        "seed": 7,
        "sampling": {"repetition_penalty": 1.5, "temperature": 0.8, "top_k": 31, "top_p": 0.95, "min_p": 0.0},
    }
    expected = {"prompt": "2 3 5 é\n", "tokens": 11, "finish_reason": "length"}
    assert [{key: value for key, value in text.items() if key != "text"} for text in texts] == [expected] * 2
    assert speed > 0
    (alone,) = samples(capsys, *arguments, "--seed", "7")
    assert output(capsys, *arguments, "--seed", "7") == "2 3 5 é\n" + alone["text"] + "\n"


def test_json_keeps_characters_that_the_output_lacks():
    """Windows writes to a file in an encoding of its own."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="cp1252", errors="replace")
    with contextlib.redirect_stdout(stream):
        generate.main(["--prompt", "中é", "--max-new-tokens", "1", "--json"])
    stream.seek(0)
    assert json.loads(stream.read())["samples"][0]["prompt"] == "中é"


def test_stderr_names_the_checkpoint_and_the_seed(capsys):
    """A seed that the program chose reproduces the text."""
    file = "runs/tiny/checkpoints/best.ckpt"
    generate.main(["--prompt", "2 3 5", "--max-new-tokens", "23"])
    printed = capsys.readouterr()
    seed = re.fullmatch(f"generate.py: sampling {file} with seed (\\d{{1,10}})\n", printed.err)[1]
    generate.main(["--prompt", "2 3 5", "--max-new-tokens", "23", "--seed", seed, "--checkpoint", "runs/tiny"])
    assert capsys.readouterr() == printed


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_precision_is_of_the_weights(capsys, precision):
    text = greedy_text(capsys, "--prompt", "2 3 5", "--precision", precision)
    model = pack_weights(make_writer(), precision)
    tokens = gpt.sampling.generation.generate(model, torch.tensor([[*b"2 3 5"]]), 23, SamplingParams(temperature=0.0))
    assert text == bytes(map(int, tokens)).decode("utf-8", "replace")
    assert text != greedy_text(capsys, "--prompt", "2 3 5", "--precision", "fp32")


@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="SKIPPED LOUDLY: no C compiler")
def test_a_compiled_model_writes_the_same_text(capsys):
    assert greedy_text(capsys, "--prompt", "2 3 5", "--compile") == expected_text(b"2 3 5", 23)


def test_an_empty_prompt_begins_a_document(monkeypatch, capsys):
    """So does none. A prompt that spells end-of-text does not: its thirteen characters are text."""
    set_stdin(monkeypatch, b"")
    assert greedy_text(capsys, "--prompt", "") == greedy_text(capsys) == expected_text(b"", 23)
    text = greedy_text(capsys, "--prompt", "<|endoftext|>")
    assert text == expected_text(b"<|endoftext|>", 23) != expected_text(b"", 23)


@pytest.mark.parametrize(("length", "excess"), [(CONTEXT, 0), (CONTEXT + 1, 1), (53, 36)])
def test_the_model_sees_the_end_of_a_long_prompt(capsys, length, excess):
    """All of the prompt is printed. Stderr names the number of tokens that are cut."""
    prompt = "2 3 5 7 11 13 17 19 23 29 31 37 41 43 47 53 59 61 67"[:length].ljust(length, "!")
    generate.main(["--prompt", prompt, "--max-new-tokens", "7", *GREEDY])
    printed = capsys.readouterr()
    assert printed.out == prompt + expected_text(prompt[-CONTEXT:].encode(), 7) + "\n"
    note = f"generate.py: the prompt has {length} tokens and the model sees 17: the first {excess} are cut\n"
    assert re.sub(NOTE, "", printed.err) == (note if excess else "")


def test_several_prompts_continue_as_each_does_alone(capsys):
    """Their lengths differ, and their order stays."""
    prompts = ["2 3 5", "7", "2 3 5 7 11 13"]
    arguments = [argument for prompt in prompts for argument in ("--prompt", prompt)]
    printed = output(capsys, *arguments, *GREEDY, "--max-new-tokens", "23", "--num-samples", "2")
    texts = [prompt + expected_text(prompt.encode(), 23) for prompt in prompts for _ in range(2)]
    assert printed == "".join(f"--- {i + 1} of 6 ---\n{text}\n" for i, text in enumerate(texts))


def test_samples_end_one_by_one(capsys):
    """A sample ends before its first stop string, and the others grow."""
    arguments = ["--prompt", "2 3 5", "--max-new-tokens", "53", "--num-samples", "3", "--seed", "7"]
    texts = [sample["text"] for sample in samples(capsys, *arguments)]
    stop, later = texts[0][5], texts[0][11:13]
    stopped = samples(capsys, *arguments, "--stop", later, "--stop", stop)
    assert [sample["text"] for sample in stopped] == [text.split(stop)[0].split(later)[0] for text in texts]
    assert stopped[0]["tokens"] < max(sample["tokens"] for sample in stopped)
    assert stopped[0]["finish_reason"] == "stop"


def test_stop_strings_have_escapes():
    """Other backslashes stay as they are."""
    texts = {r"\n": "\n", r"\t": "\t", r"\r": "\r", r"\\": "\\", r"\\n": r"\n", r"é\d\\\n": "é\\d\\\n", "\n": "\n"}
    assert {text: unescape(text) for text in texts} == texts


def test_top_logprobs_in_json(capsys):
    """They leave the text as it is. A greedy token is the likeliest."""
    arguments = ["--prompt", "2 3 5", "--prompt", "7", "--max-new-tokens", "23", *GREEDY]
    plain = samples(capsys, *arguments)
    for sample, without in zip(samples(capsys, *arguments, "--top-logprobs", "3"), plain, strict=True):
        tokens = sample.pop("logprobs")
        assert sample == without
        assert bytes.fromhex("".join(token["bytes"] for token in tokens)).decode("utf-8", "replace") == sample["text"]
        for token in tokens:
            top_logprobs = token.pop("top_logprobs")
            assert len(top_logprobs) == 3
            assert token == top_logprobs[0]
            assert token["token"] == bytes.fromhex(token["bytes"]).decode("utf-8", "replace")
            assert token.keys() == {"token", "bytes", "logprob"}
    (sample,) = samples(capsys, "--prompt", "a", "--max-new-tokens", "2", "--top-logprobs", "0")
    assert [set(token) for token in sample["logprobs"]] == [{"token", "bytes", "logprob"}] * 2


def test_top_logprobs_print_a_line_for_each_token(monkeypatch, capsys):
    """A greedy token is itself the first of the likeliest. Probabilities have three digits."""
    arguments = ["--max-new-tokens", "7", *GREEDY, "--top-logprobs", "2"]
    out = output(capsys, "--prompt", "2 3 5", *arguments)
    (sample,) = samples(capsys, "--prompt", "2 3 5", *arguments)
    prompt, head, *lines = out.splitlines()
    assert (prompt, head) == ("2 3 5", "  token             likeliest 1       likeliest 2")
    for line, token in zip(lines, sample["logprobs"], strict=True):
        first, likeliest, second = re.findall(r"\S+ (\S+)%", line)
        probabilities = [100 * math.exp(top["logprob"]) for top in token["top_logprobs"]]
        assert first == likeliest
        assert [float(likeliest), float(second)] == pytest.approx(probabilities, rel=0.01)
    several = output(capsys, "--prompt", "2 3 5", *arguments, "--num-samples", "2")
    assert several == f"--- 1 of 2 ---\n{out}--- 2 of 2 ---\n{out}"
    set_stdin(monkeypatch, b"2 3 5\n")
    assert output(capsys, "--interactive", *arguments) == "> " + out.removeprefix("2 3 5") + "> \n"


def test_end_of_text_ends_a_text(tmp_path, capsys):
    """This model adds nothing."""
    model = make_writer()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.final_norm.bias.fill_(1.0)
        model.token_embedding.weight[EOT] = 1.0
    arguments = ["--prompt", "a", "--checkpoint", str(write_run(tmp_path / "run", model)), "--temperature", "0.1"]
    expected = {"prompt": "a", "text": "", "tokens": 1, "finish_reason": "end_of_text"}
    assert samples(capsys, *arguments, "--num-samples", "2") == [expected] * 2
    assert output(capsys, *arguments) == "a\n"
    assert output(capsys, *arguments, "--top-logprobs", "0") == "a\n  token\n  <|endoftext|> 100%\n"


@pytest.mark.parametrize(
    ("content", "prompt"),
    [
        (b"2 3 5\r\n", "2 3 5"),
        (b"2\r\n3", "2\n3"),
        (b"2 3 5\n\n", "2 3 5\n"),
        ("é\n5".encode(), "é\n5"),
        (b"", ""),
        (b"\xef\xbb\xbf2 3 5\r\n", "2 3 5"),
    ],
)
def test_prompt_from_a_file_or_standard_input(tmp_path, monkeypatch, capsys, content, prompt):
    """A byte order mark at the beginning, a newline at the end and the carriage returns of Windows are dropped."""
    file = tmp_path / "prompt.txt"
    file.write_bytes(content)
    set_stdin(monkeypatch, content)
    arguments = ["--max-new-tokens", "7", *GREEDY]
    expected = prompt + expected_text(prompt.encode(), 7) + "\n"
    assert output(capsys, *arguments, "--prompt-file", str(file)) == expected
    assert output(capsys, *arguments) == expected


INTERACTIVE = ["--interactive", "--max-new-tokens", "7"]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_interactive_lines_are_prompts(monkeypatch, capsys, encoding):
    """An empty line begins a document, and the end of input ends the session.

    Input is UTF-8 in every locale, with the line ends of every system.
    """
    stdin = io.TextIOWrapper(io.BytesIO("\ufeff2 3 5\r\n\n7é\r\n".encode()), encoding=encoding, newline="\n")
    monkeypatch.setattr(sys, "stdin", stdin)
    texts = [expected_text(prompt.encode(), 7) for prompt in ("2 3 5", "", "7é")]
    assert output(capsys, *INTERACTIVE, *GREEDY) == "".join(f"> {text}\n" for text in texts) + "> \n"
    set_stdin(monkeypatch, b"2 3 5\n")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    generate.main([*INTERACTIVE, *GREEDY, "--num-samples", "2"])
    printed = capsys.readouterr()
    assert printed.out == f"> {texts[0]}\n---\n{texts[0]}\n> \n"
    assert "Ctrl-D (on Windows Ctrl-Z and Enter)" in printed.err.splitlines()[-1]


def test_interactive_options_hold_from_their_line_on(monkeypatch, capsys):
    """A mistaken one is a line on stderr. A path is a prompt."""
    lines = ["/temperature 0", "2 3 5", "/max_new_tokens 3", "/top-k 1", "/temperature 9", "2 3 5", "/usr/bin"]
    mistakes = {
        "/temperature -1": "temperature=-1.0 .* at least 1e-06 and at most 100 ",
        "/temperature": "argument --temperature: .*''",
        "/top-k 0.5": "argument --top-k: .*'0.5'",
        "/max-new-tokens 0": "--max-new-tokens=0 .* at least 1 and at most 10000000",
        "/temprature 1": "/temprature .*/max-new-tokens /repetition-penalty /temperature ",
    }
    set_stdin(monkeypatch, "".join(f"{line}\n" for line in [*lines[:2], *mistakes, *lines[2:]]).encode())
    generate.main([*INTERACTIVE, "--temperature", "100"])
    printed = capsys.readouterr()
    for line, message in zip(printed.err.splitlines()[1:], mistakes.values(), strict=True):
        assert re.match(message, line), line
    texts = [expected_text(b"2 3 5", 7), expected_text(b"2 3 5", 3), expected_text(b"/usr/bin", 3)]
    assert printed.out == f"> > {texts[0]}\n" + "> " * 8 + f"> {texts[1]}\n> {texts[2]}\n> \n"


def test_keep_context_continues_the_text(monkeypatch, capsys):
    """An empty prompt begins a document. Ctrl-C ends a text, and the session continues."""
    contexts = []

    def draw(logits, previous, *others):
        contexts.append(previous[0].tolist())
        token = b"abc\0defghijklmnopqrstuvwx"[len(contexts) - 1]
        if token == 0:
            raise KeyboardInterrupt
        return torch.tensor([token])

    monkeypatch.setattr(gpt.sampling.generation, "next_token", draw)
    set_stdin(monkeypatch, b"2 3\n5\n\n11\n")
    assert output(capsys, *INTERACTIVE, "--keep-context") == "> abc\n> defghij\n> klmnopq\n> rstuvwx\n> \n"
    assert [contexts[i] for i in (0, 4, 11, 18)] == [[*b"2 3"], [*b"2 3abc\n5"], [EOT], [*b"klmnopq\n11"]]


@pytest.mark.parametrize("option", ["--prompt", "--stop"])
@pytest.mark.parametrize("value", ["---", "-x", "--no-such-option"])
def test_a_value_that_begins_with_a_dash_needs_an_equals_sign(option, value):
    """The line gives the remedy, and the remedy works."""
    line = harness.refusal(parse_arguments, [option, value])
    assert f"a value that begins with a dash is written {option}=VALUE" in line
    args = parse_arguments([f"{option}={value}"])
    assert getattr(args, option.removeprefix("--")) == [value]
