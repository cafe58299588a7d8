"""Warnings about settings that do not suit the text, and about a validation loss that rises again."""

import dataclasses
import json
import math
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from gpt.sampling.scoring import Score
from gpt.training.advice import list_warnings, suggest_bpe_dropout
from gpt.training.config import Config, parse_config, with_values
from gpt.training.health import warn_if_overfitting
from gpt.training.schedule import Schedule
from gpt.training.start import load_dataset
from gpt.training.state import TrainState
from harness import StopAt, Training, begin_run, differences, fit, resume_run, tiny_config, write_corpus

CHINESE = "人人生而自由在尊严和权利上一律平等他们赋有理性和良心并应以兄弟关系的精神相对待"

SPELLING = random.Random(2)
WORDS = ["".join(SPELLING.choices("abcdefghilmnoprstuvw", k=SPELLING.randint(2, 9))) for _ in range(2000)]
FREQUENCIES = [1 / (rank + 3) for rank in range(len(WORDS))]


def list_lines(config: Config) -> list[str]:
    """Return the warnings about a configuration. Each must fit a wide terminal."""
    dataset = load_dataset(config)
    schedule = Schedule.plan(config, dataset.train_tokens)
    if config.data.bpe_dropout is None and not config.init_from:
        config = with_values(config, {"data.bpe_dropout": suggest_bpe_dropout(config, schedule.total_steps, dataset)})
    lines = list_warnings(config, schedule, dataset)
    assert all(len(line) < 165 and line.isprintable() for line in lines)
    return lines


def settings(folder: Path, content: str | list[str], *changes: str) -> Config:
    """Return the default configuration on a text, or on documents, with changes as on the command line."""
    lines = content if isinstance(content, list) else []
    file = folder / ("text.jsonl" if lines else "text.txt")
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines) or str(content), encoding="utf-8")
    return changed(
        parse_config({"data": {"name": "text", "path": str(file), "cache": str(folder / "cache")}}), *changes
    )


def changed(config: Config, *changes: str) -> Config:
    """Return a configuration with changes as on the command line."""
    dotted = [re.sub("^(data|tokenizer)=", r"\1.name=", change.replace("'", "")) for change in changes]
    merged = OmegaConf.merge(OmegaConf.create(dataclasses.asdict(config)), OmegaConf.from_dotlist(dotted))
    return parse_config(OmegaConf.to_container(merged))


def words(count: int, seed: int = 3) -> str:
    """Return lines of made-up words of about 7 bytes. As in a language, some words are frequent."""
    chooser = random.Random(seed)
    return "".join(word + chooser.choice("    \n") for word in chooser.choices(WORDS, FREQUENCIES, k=count))


def test_bpe_dropout_grows_with_the_epochs(tmp_path):
    """It is 0 up to five epochs. In a mixture, the text that is seen less decides."""
    config = settings(tmp_path, words(9000), "tokenizer.vocab_size=320", "model.context_length=16")
    dataset = load_dataset(config)
    probabilities = [
        suggest_bpe_dropout(config, epochs * dataset.train_tokens // 1024, dataset) for epochs in (2, 5, 7.5, 10, 90)
    ]
    assert probabilities == pytest.approx([0.0, 0.0, 0.1, 0.2, 0.5], abs=0.003)
    (tmp_path / "other.txt").write_text(words(40000, seed=5))
    both = changed(config, "data=mix", f"data.path=[{config.data.path},{tmp_path / 'other.txt'}]", "data.weights=[1,1]")
    dataset = load_dataset(both)
    steps = 14 * len(dataset.sources[0].train) // 1024  # seven epochs of the first, and fewer of the second
    assert suggest_bpe_dropout(both, steps, dataset) == 0.0


# --- settings that do not suit the text ---


def test_suggested_settings_end_the_warnings_about_a_poem(tmp_path):
    """Only its small validation text remains: no setting helps."""
    config = settings(tmp_path, words(450))
    epochs, vocabulary, validation = list_lines(config)
    assert re.match(
        r"4,000 steps would read the text [34],\d\d\d times; beyond about 20 .*: try horizon=30steps$", epochs
    )
    assert re.match(
        r"the validation text has \d\d\d tokens \(\d\d\d bytes\), under 4,000: .* by 1\d%; only", validation
    )
    assert re.match(r"a vocabulary of \d\d\d .* fewer than 4: try tokenizer=bpe tokenizer.vocab_size=320$", vocabulary)
    suggestions = [word for line in (epochs, vocabulary) for word in line.split() if "=" in word]
    [line] = list_lines(changed(config, *suggestions))
    assert line.startswith("the validation text has ")


def test_defaults_suit_a_megabyte(tmp_path):
    """So do GPT-2's tokens, and many documents."""
    text = words(160_000)
    assert list_lines(settings(tmp_path, text)) == []
    assert list_lines(settings(tmp_path, text, "tokenizer=gpt2")) == []
    articles = [words(400, seed) for seed in range(399)]
    assert list_lines(settings(tmp_path, articles)) == []
    [line] = list_lines(settings(tmp_path, text, "data.validation_bytes=5003"))
    assert line.endswith("%; try data.validation_bytes=1000000")


def test_dropout_allows_more_epochs(tmp_path):
    """With model=auto there is no warning: it ends before the model memorizes the text."""
    config = settings(tmp_path, words(60_000), "horizon=25epochs")
    for changes, limits in (
        ([], ["25 times; beyond about 20 "]),
        (["model.dropout=0.2"], []),
        (["model.dropout=0.2", "horizon=40epochs"], ["40 times; beyond about 30 "]),
    ):
        lines = list_lines(changed(config, *changes))
        assert len(lines) == len(limits)
        assert all(f"read the text {limit}" in line for limit, line in zip(limits, lines, strict=True))
    assert list_warnings(config, Schedule(total_steps=10**6, expected_bits=2.0), load_dataset(config)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [[], ["data=python_stdlib"], ["data=python_stdlib", "tokenizer=gpt2", "model.context_length=1024"]],
    ids=["quick start", "code", "code in GPT-2's tokens"],
)
def test_quick_start_gets_no_warning(tmp_path, changes):
    """Nor does code, with its many spaces."""
    assert list_lines(changed(Config(), f"data.cache={tmp_path}", *changes)) == []


def test_gpt2_tokenizer_on_chinese_gets_a_warning(tmp_path):
    """The tokenizer that the line suggests gets none."""
    chooser = random.Random(7)
    text = "".join("".join(chooser.choices(CHINESE, k=chooser.randint(3, 19))) + "。" for _ in range(9_000))
    config = settings(tmp_path, text, "tokenizer=gpt2", "horizon=100steps")
    [line] = list_lines(config)
    match = re.match(r"GPT-2's .* each 1\.\d bytes of this text, .*: try (tokenizer=bpe) (.*_size=\d+)$", line)
    assert match and list_lines(changed(config, match[1], match[2])) == []
    assert not any("GPT-2" in line for line in list_lines(settings(tmp_path, "    x = 1_1\n" * 3001, "tokenizer=gpt2")))


def test_small_part_of_a_mixture_is_seen_too_often(tmp_path):
    """The suggested smaller weight ends the warning."""
    (tmp_path / "poem.txt").write_text(words(450), encoding="utf-8")
    config = settings(tmp_path, words(30_000), "horizon=600steps")
    paths = [config.data.path, str(tmp_path / "poem.txt")]
    for weights, is_warned in (([2, 3], True), ([2, 0.01], False)):
        mix = dataclasses.replace(config.data, name="mix", path=paths, weights=weights)
        lines = list_lines(dataclasses.replace(config, data=mix))
        line = (
            r"600 steps would read poem [\d,]+ times; beyond about 15 .*: try a smaller weight for it in data.weights"
        )
        assert [bool(re.match(line, warning)) for warning in lines] == [True] * is_warned


def test_new_run_prints_warnings(tmp_path, capsys):
    """They are on stderr, whether the text is newly prepared or in the cache."""
    write_corpus(tmp_path)
    config = tiny_config(tmp_path)
    for run in ("one", "two"):
        begin_run(dataclasses.replace(config, run_dir=str(tmp_path / run)))
        lines = capsys.readouterr().err.splitlines()
        assert [line.split(" has ")[0] for line in lines] == [
            "train.py: 4,000 steps would read the text 106 times; beyond about 20 a model only memorizes it: try "
            "horizon=377steps",
            "train.py: the validation text",
        ]


# --- a validation loss that rises again ---

NEVER = -1


@pytest.mark.parametrize(
    ("validation", "training", "expected"),
    [
        ([5.0, 4.0, 4.2, 4.3, 4.4], [4.0, 3.0, 2.5, 2.0, 1.5], 4),
        ([5.0, 4.0, 4.03, 4.03, 4.03], [4.0, 3.0, 2.5, 2.0, 1.5], NEVER),  # within the margin
        ([5.0, 4.0, 4.2, 3.9, 4.1], [4.0, 3.0, 2.5, 2.0, 1.5], NEVER),  # not in a row
        ([5.0, 4.0, 4.2, 4.3, 4.4], [4.0, 3.0, 3.1, 3.0, 2.95], NEVER),  # training does not fall either
        ([5.0, 4.0, 4.2, 4.3, 4.4], [4.0, math.nan, 2.5, 2.0, 1.5], 5),  # compared with the first point of its curve
        ([4.0, 4.2, 4.3, 3.5, 4.2, 4.3], [4.0, 3.0, 2.5, 2.0, 1.5, 1.0], 3),  # and not again
    ],
)
def test_warning_after_two_validations_above_the_best(capsys, validation, training, expected):
    """The training loss must have fallen since the best validation."""
    state = TrainState()
    spec = SimpleNamespace(config=Config(), dataset=SimpleNamespace(train_tokens=10**9))
    warned = []
    for step, (loss, train_loss) in enumerate(zip(validation, training, strict=True), start=1):
        state.train_loss = None if math.isnan(train_loss) else train_loss
        if loss < state.best_loss:
            state.best_loss, state.best_step = loss, step
        warn_if_overfitting(spec, state, step, Score(loss, 1, 1))  # type: ignore[arg-type]
        warned += [(step, line) for line in capsys.readouterr().err.splitlines()]
    assert [step for step, _ in warned] == ([] if expected == NEVER else [expected])
    best_then = validation.index(min(validation[:expected])) + 1
    assert all(f"lowest at step {best_then} " in line and f"horizon={best_then}steps" in line for _, line in warned)


@pytest.mark.slow
def test_resumed_run_warns_once(corpus_folder, tmp_path, overfitting, capsys):
    """Stopped before and after the warning, it equals a run that was never stopped."""
    config = tiny_config(corpus_folder, "horizon=23steps", "trainer.validate_every=3", "data.prompts=[]")
    line = "train.py: validation loss was lowest at step 6 and has risen since, while training loss keeps falling: the "
    line += "model overfits. best.ckpt holds step 6; try horizon=6steps"

    def count_warnings(training: Training, stop: int = 0) -> int:
        fit(training, [StopAt(stop)] if stop else [])
        return capsys.readouterr().err.splitlines().count(line)

    reference, parts = (tmp_path / name for name in ("whole", "parts"))
    assert count_warnings(begin_run(dataclasses.replace(config, run_dir=str(reference)))) == 1
    assert count_warnings(begin_run(dataclasses.replace(config, run_dir=str(parts))), stop=10) == 0
    assert count_warnings(resume_run(str(parts)), stop=14) == 1
    assert count_warnings(resume_run(str(parts))) == 0
    assert differences(parts, reference) == []
