"""Samples of a run: their prompts, how they are stored, and the longest passage copied from the training text."""

import html
import re
import shlex

import pytest
import yaml

import generate
from gpt.data.corpus import DataConfig
from gpt.data.prepare import prepare
from gpt.data.tokenizer import TokenizerConfig
from gpt.training.samples import longest_copy
from harness import TINY_RUN, begin_run, fit, read_events, tiny_config, train, write_corpus


@pytest.mark.parametrize(
    ("setting", "prompt"),
    [(["data.prompts=null"], "one of a kind"), (["data.prompts=['once','-x\ny']", "logger=[]"], "-x")],
)
def test_prompts(tmp_path, setting, prompt):
    """Prompts come from the text or the user. They are stored, and the report's command uses the last one."""
    corpus = write_corpus(tmp_path)
    corpus.write_text(corpus.read_text() + "\n\none of a kind and no more\n" * 3)
    places = [f"data.path={corpus}", f"data.cache={tmp_path / 'cache'}", f"run_dir={tmp_path / 'run'}"]
    done = train(*TINY_RUN, *places, "horizon=3steps", *setting)
    stored = yaml.safe_load((tmp_path / "run/config.yaml").read_text())["data"]["prompts"]
    assert stored == (["once", "-x\ny"] if len(setting) > 1 else ["", prompt])
    (command,) = re.findall(r"^sample it: +python generate\.py (.*)$", done.stdout, re.M)
    assert generate.parse_arguments(shlex.split(command)).prompt == [prompt]
    assert f"\n```\n[{stored[-1]}]" in (tmp_path / "run/samples.md").read_text()


@pytest.mark.filterwarnings("ignore")  # of what TensorBoard renders Markdown with
def test_samples_are_no_markdown(corpus_folder):
    """TensorBoard and samples.md show Markdown in prompts and samples as text."""
    from tensorboard import plugin_util

    prompts = ["* **alpha**", "````\n# alpha <b>\n````"]
    run_dir = corpus_folder / "markdown"
    config = tiny_config(corpus_folder, "horizon=1steps", f"run_dir={run_dir}")
    config.data.prompts = prompts
    fit(begin_run(config))
    (written,) = read_events(run_dir).Tensors("samples/text_summary")
    page = plugin_util.markdown_to_safe_html(written.tensor_proto.string_val[0])
    shown = re.findall(r"<pre><code>(.*?)</code></pre>", page, re.S)
    for prompt, block in zip(prompts, shown, strict=True):
        assert html.unescape(block).startswith(f"[{prompt}]")
    rest = re.sub(r"<pre><code>.*?</code></pre>|<!-- WARNING: .* null bytes .*? -->", "", page, flags=re.S)
    assert set(rest.split()) == {"<hr>"}
    assert written.tensor_proto.string_val[0] in (run_dir / "samples.md").read_bytes()


def test_longest_copy(tmp_path):
    """The longest passage that occurs in a sample and the training text is found. It is within one sample."""
    corpus = tmp_path / "text.txt"
    corpus.write_text("we hold these truths to be self-evident, that all men are created equal " * 9)
    data = DataConfig("text", str(corpus))
    corpora = prepare(data, TokenizerConfig("byte"), 8, tmp_path / "cache", print_line=lambda line: None)
    tokens = lambda text: list(text.encode())  # noqa: E731
    samples = [tokens("we hold fast; truths to be self-evid"), tokens("ent, that all ships are"), []]
    assert longest_copy(samples, corpora) == " truths to be self-evid"
    assert longest_copy([tokens("ships are not equa")], corpora) == ""
