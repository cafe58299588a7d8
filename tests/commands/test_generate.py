"""generate.py as people use it: in real processes to see how it streams and ends, within this process elsewhere."""

import contextlib
import io
import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

import generate
import gpt.sampling.generation
import gpt.sampling.language_model
import harness
from gpt.data.corpus import DataConfig
from gpt.data.prepare import prepare
from gpt.data.tokenizer import TokenizerConfig, byte_tokenizer
from gpt.sampling.arguments import unescaped
from gpt.sampling.generation import SamplingParams, window_start
from gpt.sampling.language_model import Completion, TokenLogprob
from gpt.sampling.printing import copied, printable
from harness import set_stdin
from small_models import CONTEXT, EOT, make_writer, write_run

PROGRAM = Path(generate.__file__).resolve()
NOTE = r"generate\.py: sampling .+ with seed \d+\n"  # what stderr says of every text


@pytest.fixture
def here(project, monkeypatch) -> Path:
    """The project as the current folder, so that its only run is the newest."""
    monkeypatch.chdir(project)
    return project


@torch.no_grad()
def expected_text(prompt: bytes, new: int, slide: int = 1) -> str:
    """The greedy continuation, by the slow loop: the whole view through the model for every token."""
    model, idx = make_writer(), torch.tensor([(list(prompt) or [EOT])[-CONTEXT:]])
    start = idx.shape[1]
    for length in range(start, start + new):
        view = idx[:, window_start(length, CONTEXT, slide) :]
        idx = torch.cat([idx, model(view)[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert EOT not in idx[0, start:]
    return bytes(idx[0, start:].tolist()).decode("utf-8", "replace")


def output(capsys, *arguments: str) -> str:
    """Run generate.py in this process and return what it prints; stderr says what is sampled, and nothing else."""
    generate.main(list(arguments))
    printed = capsys.readouterr()
    assert re.fullmatch(NOTE, printed.err)
    return printed.out


def report(capsys, *arguments: str) -> dict:
    """What generate.py prints with --json."""
    return json.loads(output(capsys, "--json", *arguments))


def greedy(capsys, *arguments: str) -> str:
    """The greedy continuation of 23 tokens that it reports."""
    (sample,) = report(capsys, "--temperature", "0", "--max-new-tokens", "23", *arguments)["samples"]
    assert (sample["tokens"], sample["finish_reason"]) == (23, "length")
    return sample["text"]


def refusal(capsys, *arguments: str) -> str:
    """The one line with which generate.py refuses, after the note if only the model shows the mistake."""
    line = harness.refusal(generate.main, list(arguments))
    assert re.fullmatch(f"({NOTE})?", capsys.readouterr().err)
    return line


@contextlib.contextmanager
def started(folder: Path, *arguments: str) -> Iterator[subprocess.Popen]:
    """Start a real generate.py in a folder, its output piped, and buffered even if the environment says otherwise."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, PROGRAM, *arguments]
    with subprocess.Popen(command, cwd=folder, env=environment, bufsize=0, **streams) as process:
        try:
            yield process
        finally:
            process.kill()  # it has ended long ago, if all is well


def test_imports_stay_light(project):
    """Sampling imports none of the training's frameworks, nor PyTorch's compiler, which takes a second."""
    code = (
        "import sys, gpt.sampling.generation, generate\n"
        "generate.main(['--prompt', 'a', '--max-new-tokens', '1', '--json'])\n"
        "heavy = {'lightning', 'pytorch_lightning', 'hydra', 'omegaconf', 'tensorboard', 'transformers'}\n"
        "heavy |= {'tokenizers', 'huggingface_hub', 'pyarrow', 'pandas', 'wandb', 'mlflow', 'train', 'torch._dynamo'}\n"
        "print(sorted(heavy & set(sys.modules)), 'gpt.sampling.generation' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    environment = os.environ | {"PYTHONPATH": str(PROGRAM.parent)}
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "[] True")


def test_closed_pipe(project):
    """As with `| head -c 5`: when the reader has gone, the program ends quietly, long before its text would."""
    with started(project, "--prompt", "2 3 5 7", "--max-new-tokens", "1000000") as process:
        assert process.stdout.read(5) == b"2 3 5"
        process.stdout.close()
        assert process.wait(timeout=60) == 0
        assert re.fullmatch(NOTE, process.stderr.read().decode())


def test_ctrl_c(project):
    """Text is streamed as it is made, and Ctrl-C in the middle of it ends with 130 and not another word."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit "ignore"
    try:
        with started(project, "--prompt", "2 3 5 7 ", "--max-new-tokens", "1000000") as process:
            text = b"".join(process.stdout.read(1) for _ in range(53))  # by then it is in the midst of its text
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            rest, error = process.communicate(timeout=60)
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.returncode == 130
    assert re.fullmatch(NOTE, error.decode())
    assert text.startswith(b"2 3 5 7 ")
    assert len(text + rest) < 8000  # unflushed, it would come 8,192 bytes at a time


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "temperature=-1.0 .* at least 1e-06 and at most 100"),
        (["--top-k", "1.5"], "--top-k: .*'1.5'"),
        (["--repetition-penalty", "0"], "repetition-penalty=0.0 .* at least 0.01"),
        (["--slide", "18"], "slide=18 .* at most 17 \\(the model's context\\)"),
        (["--stop", ""], "stop='' .* at least one character"),
        (["--top-logprobs", "101"], "--top-logprobs=101 .* at least 0 and at most 100"),
        (["--keep-context"], "--keep-context is for one text with --interactive"),
        (["--tempo", "1"], "unrecognized arguments: --tempo 1; see .*--help"),
        (["--precision", "fp8"], "--precision: invalid choice: 'fp8'.*bf16"),
        (["--device", "abacus"], "device 'abacus' is not on this machine: choose from auto, .*cpu"),
        (["--prompt-file", "none.txt"], "--prompt-file: not allowed with argument --prompt"),
        (["--interactive"], "--interactive: not allowed with argument --prompt"),
        (["--checkpoint", "nowhere"], "nowhere: there is no such checkpoint"),
        (["--insight", "page.html", "--json"], "--interactive, --json, and --check or --insight exclude each other"),
        (["--insight", "page.html", "--num-samples", "2"], "--insight and --compile are for a single text"),
        (["--compile", "--prompt", "b"], "--insight and --compile are for a single text: give one prompt"),
        (["--insight", "no/page.html"], "--insight=no/page.html cannot be written: name a file in a folder"),
        (["--insight", "."], "--insight=. cannot be written: name a file in a folder that exists"),
        (["--check"], "--check: the text that .* was trained on is not in"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments(here, capsys, arguments, message):
    """Each is answered with exit code 2 and one line that names the option, its value and what to do."""
    line = refusal(capsys, "--prompt", "a", *arguments)
    assert re.search(message, line), line


def test_help(capsys):
    """Every option has its line, which names the default."""
    with pytest.raises(SystemExit) as end:
        generate.main(["--help"])
    options = re.split(r"^  (?=--)", capsys.readouterr().out, flags=re.M)[1:]
    assert end.value.code == 0
    assert len(options) > 20
    assert [option for option in options if "default: " not in " ".join(option.split())] == []


def test_json_where_output_is_not_unicode(here, monkeypatch):
    """JSON keeps every character where Windows would write a file in its own encoding."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="cp1252", errors="replace")
    with contextlib.redirect_stdout(stream):
        generate.main(["--prompt", "中é", "--max-new-tokens", "1", "--json"])
    stream.seek(0)
    assert json.loads(stream.read())["samples"][0]["prompt"] == "中é"


def test_bad_prompts(here, tmp_path, monkeypatch, capsys):
    """A prompt file that is missing, a folder, or not UTF-8: then the first bad byte and its place are named.

    So is standard input.
    """
    for name, reason in (("none.txt", "No such file or directory"), ("a" * 300, "File name too long")):
        assert refusal(capsys, "--prompt-file", name).endswith(
            f"{name}: cannot be read ({reason}); fix that, or move the file away"
        )
    assert "cannot be read (Is a directory)" in refusal(capsys, "--prompt-file", str(tmp_path))
    file = tmp_path / "latin-1.txt"
    file.write_bytes("2 3 5 é 7".encode("latin-1"))
    assert f"{file}: not UTF-8 (byte 0xe9 at offset 6)" in refusal(capsys, "--prompt-file", str(file))
    set_stdin(monkeypatch, "23é".encode()[:-1])
    assert "standard input: not UTF-8 (byte 0xc3 at offset 2)" in refusal(capsys)


def test_insight(here, capsys, tmp_path):
    """The page shows the tokens of the prompt and those that were printed, and another replaces it."""
    page = tmp_path / "page.html"
    for prompt in ("ab", ""):
        generate.main(["--prompt", prompt, "--max-new-tokens", "7", "--seed", "3", "--insight", str(page)])
        written = f"generate.py: wrote {page} ({page.stat().st_size:,} bytes): open it in a browser"
        assert capsys.readouterr().err.splitlines()[-1] == written
        data = json.loads(re.findall(r'id="data">(.*?)</script>', page.read_text())[0])
        assert data["given"] == max(1, len(prompt))
        assert (len(data["tokens"]), data["facts"]["seed"], data["facts"]["top_p"]) == (data["given"] + 7, 3, 0.95)
    assert list(tmp_path.iterdir()) == [page]


def test_check(tmp_path):
    """What a text has in common with the training text is in brackets."""
    (tmp_path / "text.txt").write_text(
        "we hold these truths to be self-evident, that all men are created equal \u00a3" * 9, encoding="utf-8"
    )
    data = DataConfig("text", str(tmp_path / "text.txt"))
    corpora = prepare(data, TokenizerConfig("byte"), 8, tmp_path / "cache", print_line=lambda line: None)
    ids = list(b"all men are fast, to be self-evid, all men are ")
    counts = "41 of 47 tokens, in [[brackets]]; the longest passage has 16 characters"
    shown = f"--- copied from the training text: {counts} ---\n"
    shown += "[[all men are ]]fast,[[ to be self-evid]],[[ all men are ]]\n"
    assert copied(ids, list(corpora.sources)) == shown
    yen = copied(list("created equal \u00a5".encode()), list(corpora.sources))  # its first byte is a pound's
    assert "15 of 16 tokens" in yen and yen.endswith("[[created equal ]]\u00a5\n")
    half = copied(
        list("\u0123we hold these truths".encode()), list(corpora.sources)
    )  # begins with the end of a character
    assert half.endswith("\u0123[[we hold these truths]]\n") and "20 of 22 tokens" in half
    nothing = "--- copied from the training text: nothing of 8 tokens or more ---\n"
    assert copied(list(b"truth"), list(corpora.sources)) == nothing


@pytest.mark.parametrize("parts", [1, 2])
def test_passages_that_overlap(tmp_path, parts):
    """What is in brackets stands in the training text as a whole, from one corpus or two; the longest is not cut."""
    texts = ["The quiet river ran under\n" * 9, "under the old stone bridge\n" * 9]
    sources = []
    for i, text in enumerate(["".join(texts)] if parts == 1 else texts):
        (tmp_path / f"{i}.txt").write_text(text)
        data = DataConfig("text", str(tmp_path / f"{i}.txt"))
        sources += prepare(data, TokenizerConfig("byte"), 8, tmp_path / "cache", print_line=lambda line: None).sources
    shown = copied(list(b"quiet river ran under the old stone, quiet"), sources)
    counts = "35 of 42 tokens, in [[brackets]]; the longest passage has 21 characters"
    brackets = "[[quiet river ran under]][[ the old stone]], quiet"
    assert shown == f"--- copied from the training text: {counts} ---\n{brackets}\n"


def test_out_of_memory(here, capsys, monkeypatch):
    """If memory runs out, that is said in one line."""
    monkeypatch.setattr(gpt.sampling.generation, "next_token", mock.Mock(side_effect=MemoryError))
    told = harness.command_refusal(capsys, str(PROGRAM), "--prompt", "a")
    assert told.startswith("generate.py: memory has run out: lower --num-samples, ")


def test_weights_that_overflow(tmp_path, capsys):
    """A model whose weights are finite and whose logits are not is named, rather than PyTorch's complaint shown."""
    model = make_writer()
    with torch.no_grad():
        model.final_norm.bias.fill_(3e38)
    run = str(write_run(tmp_path / "run", model))
    assert "the model's logits are not finite" in refusal(capsys, "--prompt", "a", "--checkpoint", run)
    greedy = ["--temperature", "0", "--top-logprobs", "2", "--json"]
    assert "the model's logits are not finite" in refusal(capsys, "--prompt", "a", "--checkpoint", run, *greedy)


def test_json_is_complete(here, capsys):
    """One valid JSON object with all that it takes to make the same text again."""
    arguments = ["--prompt", "2 3 5 é\n", "--max-new-tokens", "11", "--top-k", "31", "--repetition-penalty", "1.5"]
    printed = report(capsys, *arguments, "--num-samples", "2", "--seed", "7")
    samples, speed = printed.pop("samples"), printed.pop("tokens_per_second")
    assert printed == {
        "checkpoint": str(Path("runs/tiny/checkpoints/best.ckpt")),
        "seed": 7,
        "sampling": {"repetition_penalty": 1.5, "temperature": 0.8, "top_k": 31, "top_p": 0.95, "min_p": 0.0},
    }
    assert [set(sample) for sample in samples] == [{"prompt", "text", "tokens", "finish_reason"}] * 2
    assert [(sample["tokens"], sample["finish_reason"]) for sample in samples] == [(11, "length")] * 2
    assert [sample["prompt"] for sample in samples] == ["2 3 5 é\n"] * 2
    assert speed > 0
    alone = report(capsys, *arguments, "--seed", "7")["samples"]
    assert output(capsys, *arguments, "--seed", "7") == "2 3 5 é\n" + alone[0]["text"] + "\n"


def test_note(here, capsys):
    """Stderr names the checkpoint and the seed: those chosen by the program, and those given."""
    file = "runs/tiny/checkpoints/best.ckpt"
    generate.main(["--prompt", "2 3 5", "--max-new-tokens", "23"])
    printed = capsys.readouterr()
    seed = re.fullmatch(f"generate.py: sampling {file} with seed (\\d{{1,10}})\n", printed.err)[1]
    generate.main(["--prompt", "2 3 5", "--max-new-tokens", "23", "--seed", seed, "--checkpoint", "runs/tiny"])
    assert capsys.readouterr() == printed
    generate.main(["--prompt", "a", "--max-new-tokens", "1", "--seed", "7", "--json"])
    assert capsys.readouterr().err == f"generate.py: sampling {file} with seed 7\n"


@pytest.mark.parametrize("slide", [1, 5, CONTEXT])
def test_slide(here, capsys, slide):
    """The view moves on by as many tokens as one asks."""
    text = greedy(capsys, "--prompt", "2 3 5 7 11", "--slide", str(slide))
    assert text == expected_text(b"2 3 5 7 11", 23, slide)
    assert (text == expected_text(b"2 3 5 7 11", 23)) is (slide == 1)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_precision(here, capsys, precision):
    """With --precision the weights themselves are in it."""
    text = greedy(capsys, "--prompt", "2 3 5", "--precision", precision)
    model = gpt.sampling.packed.pack_weights(make_writer(), precision)
    tokens = gpt.sampling.generation.generate(model, torch.tensor([[*b"2 3 5"]]), 23, SamplingParams(temperature=0.0))
    assert text == bytes(int(token) for token in tokens).decode("utf-8", "replace")
    assert text != greedy(capsys, "--prompt", "2 3 5", "--precision", "fp32")


def test_empty_prompt(here, monkeypatch, capsys):
    """An empty prompt, and no prompt at all, begin a document: after end-of-text."""
    set_stdin(monkeypatch, b"")
    assert greedy(capsys, "--prompt", "") == greedy(capsys) == expected_text(b"", 23)


def test_prompt_that_spells_end_of_text(here, capsys):
    """The thirteen characters stay text, and do not begin a document."""
    text = greedy(capsys, "--prompt", "<|endoftext|>")
    assert text == expected_text(b"<|endoftext|>", 23)
    assert text != expected_text(b"", 23)


@pytest.mark.parametrize(("length", "cut"), [(CONTEXT, 0), (CONTEXT + 1, 1), (53, 36)])
def test_long_prompt(here, capsys, length, cut):
    """Of a prompt longer than the context only the end is seen, and stderr says how much is not; all is printed."""
    prompt = "2 3 5 7 11 13 17 19 23 29 31 37 41 43 47 53 59 61 67"[:length].ljust(length, "!")
    generate.main(["--prompt", prompt, "--max-new-tokens", "7", "--temperature", "0"])
    printed = capsys.readouterr()
    assert printed.out == prompt + expected_text(prompt[-CONTEXT:].encode(), 7) + "\n"
    note = f"generate.py: the prompt has {length} tokens and the model sees 17: the first {cut} are cut\n"
    assert re.sub(NOTE, "", printed.err) == (note if cut else "")


def test_several_prompts(here, capsys):
    """Prompts of different lengths, continued at once, go on as each does alone, in the order in which they came."""
    prompts = ["2 3 5", "7", "2 3 5 7 11 13"]
    alone = [greedy(capsys, "--prompt", prompt) for prompt in prompts]
    given = [argument for prompt in prompts for argument in ("--prompt", prompt)]
    arguments = [*given, "--temperature", "0", "--max-new-tokens", "23", "--num-samples", "2"]
    samples = report(capsys, *arguments)["samples"]
    assert [(s["prompt"], s["text"]) for s in samples] == [
        (prompt, text) for prompt, text in zip(prompts, alone, strict=True) for _ in range(2)
    ]
    printed = output(capsys, *given, "--temperature", "0", "--max-new-tokens", "23")
    assert printed == "".join(f"--- {i + 1} of 3 ---\n{prompts[i]}{alone[i]}\n" for i in range(3))


def test_stop(here, capsys):
    """The text ends before the first of the stop strings, and says that this is why."""
    arguments = ["--prompt", "2 3 5", "--max-new-tokens", "23", "--temperature", "0"]
    text = expected_text(b"2 3 5", 23)
    stop, later = text[7:9], text[11:13]
    expected = text[: min(text.index(stop), text.index(later))]
    assert 0 < len(expected) < len(text)
    stops = ["--stop", later, "--stop", stop, "--stop", "never there"]
    (sample,) = report(capsys, *arguments, *stops)["samples"]
    assert (sample["text"], sample["finish_reason"]) == (expected, "stop")
    assert sample["tokens"] < 23
    assert output(capsys, *arguments, *stops) == "2 3 5" + expected + "\n"


def test_stop_ends_each_sample(here, capsys):
    """Samples that end early are cut there, and the others go on."""
    arguments = ["--prompt", "2 3 5", "--max-new-tokens", "53", "--num-samples", "3", "--seed", "7"]
    texts = [sample["text"] for sample in report(capsys, *arguments)["samples"]]
    stop = texts[0][5]
    samples = report(capsys, *arguments, "--stop", stop)["samples"]
    assert [sample["text"] for sample in samples] == [text.split(stop)[0] for text in texts]
    assert samples[0]["tokens"] < max(sample["tokens"] for sample in samples)


def give_tokens(monkeypatch, text: bytes) -> list[bytes]:
    """Make the model say these bytes, one at a time, and Ctrl-C for a zero; return what it will have seen each time."""
    seen = []

    def draw(logits, previous, *others):
        seen.append(bytes(previous[0].tolist()))
        if (token := text[len(seen) - 1]) == 0:
            raise KeyboardInterrupt
        return torch.tensor([token])

    monkeypatch.setattr(gpt.sampling.generation, "next_token", draw)
    return seen


def test_stop_escapes(here, monkeypatch, capsys):
    """Backslash-n and three others stand for what one cannot easily type; other backslashes are what they are."""
    shown = {r"\n": "\n", r"\t": "\t", r"\r": "\r", r"\\": "\\", r"\\n": r"\n", r"é\d\\\n": "é\\d\\\n", "\n": "\n"}
    assert {text: unescaped(text) for text in shown} == shown
    give_tokens(monkeypatch, b"ab\tcd\nef")
    assert output(capsys, "--prompt", "2 3", "--stop", r"\n") == "2 3ab\tcd\n"
    give_tokens(monkeypatch, b"ab\tcd\nef")
    assert output(capsys, "--prompt", "2 3", "--stop", r"\n", "--stop", r"b\tc") == "2 3a\n"


@torch.no_grad()
def expected_logprobs(prompt: bytes, new: bytes) -> torch.Tensor:
    """The log-probabilities (new tokens, V) of the plain model, which sees as much as it can."""
    model, ids = make_writer(), [*prompt, *new]
    views = [ids[max(0, length - CONTEXT) : length] for length in range(len(prompt), len(ids))]
    return torch.stack([model(torch.tensor([view]))[0, -1].log_softmax(-1) for view in views])


@pytest.mark.parametrize("sampling", [["--temperature", "0"], ["--temperature", "3", "--top-k", "5", "--seed", "3"]])
def test_top_logprobs_in_json(here, capsys, sampling):
    """Of every token, past the context too, the probability in the plain model, and the likeliest in its place."""
    arguments = ["--prompt", "2 3 5", "--max-new-tokens", "23", "--num-samples", "2", *sampling]
    plain = report(capsys, *arguments)["samples"]
    for sample, without in zip(report(capsys, *arguments, "--top-logprobs", "3")["samples"], plain, strict=True):
        tokens = sample.pop("logprobs")
        assert sample == without
        ids = [int(token["bytes"], 16) for token in tokens]
        assert bytes(ids).decode("utf-8", "replace") == sample["text"]
        expected = expected_logprobs(b"2 3 5", bytes(ids))
        likeliest = expected.topk(3)
        for i, token in enumerate(tokens):
            assert token["logprob"] == pytest.approx(expected[i, ids[i]].item(), abs=1e-4)
            assert token["token"] == bytes([ids[i]]).decode("utf-8", "replace")
            assert [int(other["bytes"], 16) for other in token["top_logprobs"]] == likeliest.indices[i].tolist()
            found = [other["logprob"] for other in token["top_logprobs"]]
            assert found == pytest.approx(likeliest.values[i].tolist(), abs=1e-4)
    (sample,) = report(capsys, "--prompt", "a", "--max-new-tokens", "2", "--top-logprobs", "0")["samples"]
    assert [set(token) for token in sample["logprobs"]] == [{"token", "bytes", "logprob"}] * 2


def test_top_logprobs_on_a_terminal(here, monkeypatch, capsys):
    """A line for each token after the prompt: with temperature 0, the token itself is the first of the likeliest."""
    arguments = ["--max-new-tokens", "7", "--temperature", "0", "--top-logprobs", "2"]
    out = output(capsys, "--prompt", "2 3 5", *arguments)
    (sample,) = report(capsys, "--prompt", "2 3 5", *arguments)["samples"]
    first, head, *lines = out.splitlines()
    assert (first, len(lines), out[-1]) == ("2 3 5", 7, "\n")
    assert head == "  token             likeliest 1       likeliest 2"
    for line, token in zip(lines, sample["logprobs"], strict=True):
        own, likeliest, other = re.fullmatch(r"  (\S+ \S+%) +(\S+ \S+%) +(\S+ \S+%)", line).groups()
        assert own == likeliest
        assert float(own.split()[1][:-1]) == pytest.approx(100 * math.exp(token["logprob"]), rel=0.01)
        assert float(other.split()[1][:-1]) <= float(own.split()[1][:-1])
        assert line.index(likeliest, 3) == head.index("likeliest 1")
    block = "\n".join([first, head, *lines])
    both = output(capsys, "--prompt", "2 3 5", *arguments, "--num-samples", "2")
    assert both == f"--- 1 of 2 ---\n{block}\n--- 2 of 2 ---\n{block}\n"
    set_stdin(monkeypatch, b"2 3 5\n")
    assert output(capsys, "--interactive", *arguments) == "> " + out.removeprefix("2 3 5") + "> \n"


def test_line_of_a_token():
    """White space and parts of characters are visible, and so are the smallest probabilities."""
    top = (TokenLogprob(b"\n", math.log(0.5)), TokenLogprob(b"\xe2\x82", math.log(1e-7)))
    token = TokenLogprob(" é".encode(), math.log(0.25), top)
    head = "\n  token             likeliest 1       likeliest 2"
    lines = "\n  ·é 25%            ⏎ 50%             <e2><82> 1e-05%"
    text = Completion(byte_tokenizer())
    text.logprobs = [token]
    assert printable(text) == head + lines


def test_end_of_text(tmp_path, capsys):
    """A model that says end-of-text at once has nothing to add, and the report says why."""
    model = make_writer()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.final_norm.bias.fill_(1.0)
        model.token_embedding.weight[EOT] = 1.0
    run = str(write_run(tmp_path / "run", model))
    printed = report(capsys, "--prompt", "a", "--checkpoint", run, "--num-samples", "2", "--temperature", "0.1")
    assert printed["samples"] == [{"prompt": "a", "text": "", "tokens": 1, "finish_reason": "end_of_text"}] * 2
    arguments = ["--prompt", "a", "--checkpoint", run, "--temperature", "0.1"]
    assert output(capsys, *arguments) == "a\n"
    assert output(capsys, *arguments, "--top-logprobs", "0") == "a\n  token\n  <|endoftext|> 100%\n"


@pytest.mark.parametrize(
    ("content", "prompt"),
    [
        (b"2 3 5\r\n", "2 3 5"),
        (b"2\r\n3", "2\r\n3"),
        (b"2 3 5\n\n", "2 3 5\n"),
        (b"2 3 5", "2 3 5"),
        ("é\n5".encode(), "é\n5"),
        (b"", ""),
        (b"\xef\xbb\xbf2 3 5\r\n", "2 3 5"),
    ],
)
def test_prompt_from_a_file_or_standard_input(here, tmp_path, monkeypatch, capsys, content, prompt):
    """Both are read as they are, but for one newline at the end and a byte order mark at the beginning."""
    file = tmp_path / "prompt.txt"
    file.write_bytes(content)
    set_stdin(monkeypatch, content)
    arguments = ["--max-new-tokens", "7", "--temperature", "0"]
    expected = prompt + expected_text(prompt.encode(), 7) + "\n"
    assert output(capsys, *arguments, "--prompt-file", str(file)) == expected
    assert output(capsys, *arguments) == expected


def test_interactive(here, monkeypatch, capsys):
    """Each line is a prompt of its own, an empty one begins a document, and the end of input ends the session."""
    set_stdin(monkeypatch, "\ufeff2 3 5\n\n7é\n".encode())
    out = output(capsys, "--interactive", "--max-new-tokens", "7", "--temperature", "0")
    texts = [expected_text(prompt.encode(), 7) for prompt in ("2 3 5", "", "7é")]
    assert out == "".join(f"> {text}\n" for text in texts) + "> \n"
    set_stdin(monkeypatch, b"2 3 5\n")
    out = output(capsys, "--interactive", "--max-new-tokens", "7", "--temperature", "0", "--num-samples", "2")
    assert out == f"> {texts[0]}\n---\n{texts[0]}\n> \n"


def test_interactive_options(here, monkeypatch, capsys):
    """An option holds from its line on, with the others; a mistaken one is a line on stderr; a path is a prompt."""
    lines = ["/temperature 0", "2 3 5", "/max_new_tokens 3", "/top-k 1", "/temperature 9", "2 3 5", "/usr/bin"]
    mistakes = {
        "/temperature -1": "temperature=-1.0 is out of range: it must be at least 1e-06 and at most 100 (or 0: the ",
        "/temperature": "argument --temperature: invalid float value: ''",
        "/top-k 0.5": "argument --top-k: invalid int value: '0.5'",
        "/max-new-tokens 0": "--max-new-tokens=0 is out of range: it must be at least 1 and at most 10000000",
        "/temprature 1": "/temprature is no option: choose from /max-new-tokens /repetition-penalty /temperature ",
    }
    set_stdin(monkeypatch, "".join(f"{line}\n" for line in [*lines[:2], *mistakes, *lines[2:]]).encode())
    generate.main(["--interactive", "--max-new-tokens", "7", "--temperature", "100"])
    printed = capsys.readouterr()
    told = printed.err.splitlines()[1:]
    assert len(told) == len(mistakes)
    assert all(map(str.startswith, told, mistakes.values()))
    texts = [expected_text(b"2 3 5", 7), expected_text(b"2 3 5", 3), expected_text(b"/usr/bin", 3)]
    assert printed.out == f"> > {texts[0]}\n" + "> " * 8 + f"> {texts[1]}\n> {texts[2]}\n> \n"


def test_how_to_leave_is_said_on_a_terminal(here):
    """And nowhere else: the others here see all of stderr."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), "--interactive"], cwd=here, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE
    )
    os.write(ours, b"\x04")
    _, err = process.communicate(timeout=120)
    line = (
        "Ctrl-D (on Windows Ctrl-Z and Enter) leaves, Ctrl-C ends a text, and a line such as /temperature 0.5 changes"
    )
    assert re.match(NOTE + re.escape(line), err.decode())
    assert process.returncode == 0


def test_interactive_context(here, monkeypatch, capsys):
    """With --keep-context a prompt goes on from what was said, on a line of its own; an empty one begins afresh."""
    set_stdin(monkeypatch, b"2 3\n5\n7\n\n11\n")
    out = output(capsys, "--interactive", "--keep-context", "--max-new-tokens", "7", "--temperature", "0")
    said, expected = b"", ""
    for prompt in (b"2 3", b"5", b"7", b"", b"11"):
        said = said + b"\n" + prompt if said and prompt else prompt
        text = expected_text(said, 7)
        said, expected = said + text.encode(), f"{expected}> {text}\n"
    assert out == expected + "> \n"


def test_interactive_context_after_ctrl_c(here, monkeypatch, capsys):
    """What was printed before Ctrl-C was said as well."""
    seen = give_tokens(monkeypatch, b"abc\0defgh")
    set_stdin(monkeypatch, b"2 3\n5\n")
    out = output(capsys, "--interactive", "--keep-context", "--max-new-tokens", "5")
    assert out == "> abc\n> defgh\n> \n"
    assert (seen[3], seen[4]) == (b"2 3abc", b"2 3abc\n5")


def test_interactive_input_is_utf8_in_every_locale(here, monkeypatch, capsys):
    """As prompts from elsewhere are."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("7é\n".encode()), encoding="ascii"))
    out = output(capsys, "--interactive", "--max-new-tokens", "7", "--temperature", "0")
    assert out == f"> {expected_text('7é'.encode(), 7)}\n> \n"
