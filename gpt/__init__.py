"""A small, exact and fast GPT: attention, model, training step, exact resume and sampling.

The names below are for use from Python. Each is imported when it is first used, because torch takes seconds.
"""

import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpt.api import train
    from gpt.data.tokenizer import Tokenizer
    from gpt.model.attention import MultiHeadAttention
    from gpt.model.transformer import GPT, GPTConfig
    from gpt.sampling.generation import generate
    from gpt.sampling.language_model import LanguageModel

# The imports of a command take seconds, in which Ctrl-C ends it at once, without a traceback; then see gpt/console.py.
_SCRIPTS = [Path(__file__).resolve().parents[1] / name for name in ("train.py", "generate.py")]
_MODULE = sys.argv[0] == "-m" and any(word.startswith("gpt.") for word in sys.orig_argv)
if (_MODULE or Path(sys.argv[0]).resolve() in _SCRIPTS) and (
    signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    signal.signal(signal.SIGINT, signal.SIG_DFL)

__all__ = ["GPT", "GPTConfig", "MultiHeadAttention", "Tokenizer", "generate", "load", "train"]

_HOMES = {
    "GPT": "gpt.model.transformer",
    "GPTConfig": "gpt.model.transformer",
    "MultiHeadAttention": "gpt.model.attention",
    "Tokenizer": "gpt.data.tokenizer",
    "generate": "gpt.sampling.generation",
    "train": "gpt.api",
}


def load(path: str | Path | None = None, device: str = "auto") -> "LanguageModel":
    """Open what `--checkpoint` takes, or else the newest run: the model, in fp32 on the device, and its tokenizer.

    The device is auto, cpu, cuda or mps. `UserError`, a `ValueError`, says in one line why nothing can be opened.
    """
    from gpt.hardware.device import choose_device
    from gpt.loading import find_checkpoint, open_model
    from gpt.sampling.language_model import LanguageModel

    model, tokenizer = open_model(find_checkpoint(path))
    return LanguageModel(model.to(choose_device(device)), tokenizer)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
