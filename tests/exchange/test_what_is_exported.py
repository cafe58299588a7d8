"""Which models may be exported: those that other programs compute as ours."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import pytest

from gpt.exchange import gguf, huggingface
from gpt.exchange.huggingface import require_gpt2
from gpt.model.transformer import GPT, GPTConfig
from gpt.text.tokenizer import byte_tokenizer
from harness import refusal


@dataclass
class WithWindow(GPTConfig):
    """A configuration with a field that GPT-2 does not have, as somebody may add one."""

    other_field: int = 0


@pytest.mark.parametrize("write", [huggingface.write, lambda *parts: gguf.write(*parts, "f32")], ids=["hf", "gguf"])
def test_unknown_fields_are_not_exported(tmp_path, write: Callable):
    """A model with a field that nobody has compared with GPT-2 is refused, even at its default; nothing is written."""
    model = GPT(GPTConfig(7, 10, 1, 5, dropout=0.1, qkv_bias=False, vocab_size=257))
    require_gpt2(model)
    model.config = WithWindow(**asdict(model.config))
    line = refusal(write, model, byte_tokenizer(), tmp_path / "model.gguf")
    assert line == "model.other_field=0 is nothing that GPT-2 has, so this model cannot be exported"
    assert not list(tmp_path.iterdir())
