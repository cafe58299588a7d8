"""The model card of an export: README.md, whose front matter the Hugging Face hub reads."""

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from gpt.files import flatten, read_text, read_yaml, write_text

if TYPE_CHECKING:
    from gpt.model.transformer import GPT

CARD = """---
{front}
---

# {name}

A GPT-2 with {shape}.{trained} It continues a text, and does not answer.

```python
from transformers import pipeline

print(pipeline("text-generation", model="{name}")("The")[0]["generated_text"])
```

Its licence is for you to choose, and depends on its text: add `license: ...` above.
"""


def write_model_card(model: "GPT", checkpoint: Path, name: str, folder: Path) -> None:
    """Write the card of a model; of a run, also on which text it was trained, and how well it predicts that."""
    from huggingface_hub import EvalResult, ModelCardData

    run, c, trained, results = checkpoint.parent.parent, model.config, "", []
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # no run, or one without a validation
        config, figures = flatten(read_yaml(run / "config.yaml")), json.loads(read_text(run / "metrics.json"))
        paths = config["data.path"] or config["data.name"]
        text = ", ".join(Path(path).name for path in ([paths] if isinstance(paths, str) else paths))
        bits = round(figures["best_val_loss"] * figures["val_bits_per_byte"] / figures["val_loss"], 4)
        results = [EvalResult("text-generation", text, f"{text}, held out", "bits_per_byte", bits)]
        trained = f" Trained on {text}, of which it needs {bits} bits per byte on a part that was held out."
    tags: dict = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["gpt2"]}
    front = ModelCardData(model_name=name, eval_results=results or None, **tags).to_yaml().strip()
    shape = f"{c.num_parameters:,} parameters ({c.num_layers} layers, {c.num_heads} heads, {c.d_model} channels)"
    shape += f" and a context of {c.context_length} tokens"
    write_text(folder / "README.md", CARD.format(front=front, name=name, shape=shape, trained=trained))
