"""A small, exact and fast GPT: attention, model, training, exact resume and sampling.

`__all__` lists the names for use from Python. A name is imported when it is first used, because torch takes seconds.
"""

import os
import signal
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpt.api import train
    from gpt.data.tokenizer import Tokenizer
    from gpt.model.attention import MultiHeadAttention
    from gpt.model.transformer import GPT, GPTConfig
    from gpt.sampling.generation import generate
    from gpt.sampling.language_model import LanguageModel

# The imports of a command take seconds. Until they are done, Ctrl-C ends it at once, without a traceback. Then
# gpt/console.py handles it.
_SCRIPTS = [Path(__file__).resolve().parents[1] / name for name in ("train.py", "generate.py")]
_is_module_command = sys.argv[0] == "-m" and any(word.startswith("gpt.") for word in sys.orig_argv)
_is_command = _is_module_command or Path(sys.argv[0]).resolve() in _SCRIPTS


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    """End at once. The system drops signals without a handler that are for process 1, as in a container."""
    os._exit(128 + number)


if _is_command and os.getpid() == 1:
    for _number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(_number, _exit_on_signal)
elif _is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
_missing = [name for name in ("torch", "lightning", "hydra", "tiktoken", "yaml") if _is_command and not find_spec(name)]
if _missing:
    print(f"{', '.join(_missing)}: not installed; run pip install -e . in {_SCRIPTS[0].parent}", file=sys.stderr)
    sys.exit(2)

__all__ = ["GPT", "GPTConfig", "MultiHeadAttention", "Tokenizer", "generate", "load", "train"]

_MODULES = {
    "GPT": "gpt.model.transformer",
    "GPTConfig": "gpt.model.transformer",
    "MultiHeadAttention": "gpt.model.attention",
    "Tokenizer": "gpt.data.tokenizer",
    "generate": "gpt.sampling.generation",
    "train": "gpt.api",
}


def load(path: str | Path | None = None, device: str = "auto") -> "LanguageModel":
    """Open a model in fp32, and its tokenizer.

    Args:
        path: The same as for `--checkpoint`: a run, a checkpoint, a Hugging Face GPT-2 or a hub name. The default is
            the newest run.
        device: auto, cpu, cuda or mps.

    Raises `UserError`, a `ValueError` of one line, if it cannot be opened.
    """
    from gpt.hardware.device import choose_device
    from gpt.loading import find_checkpoint, open_model
    from gpt.sampling.language_model import LanguageModel

    model, tokenizer = open_model(find_checkpoint(path))
    return LanguageModel(model.to(choose_device(device)), tokenizer)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
