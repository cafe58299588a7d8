"""Write the model card of an export: README.md, whose front matter the Hugging Face hub reads."""

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt.files import flatten, read_text, read_yaml, write_text

if TYPE_CHECKING:
    from gpt.model.transformer import GPT

CARD_TEMPLATE = """---
{front_matter}
---

# {name}

A GPT-2 with {shape}.{training} It continues a text, and does not answer.

```python
from transformers import pipeline

print(pipeline("text-generation", model="{name}")("The")[0]["generated_text"])
```

Its licence is for you to choose, and depends on its text: add `license: ...` above.
"""


def write_model_card(model: "GPT", checkpoint: Path, name: str, folder: Path) -> None:
    """Write the card of a model.

    Args:
        model: The model.
        checkpoint: Its file. If it is a run's, the card names the run's text and the best validation on it.
        name: The model's name on the hub.
        folder: The folder of the card.
    """
    from huggingface_hub import EvalResult, ModelCardData

    run, config = checkpoint.parent.parent, model.config
    training, eval_results = "", None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # no run, or a run without a validation
        settings = flatten(read_yaml(run / "config.yaml"))
        metrics = json.loads(read_text(run / "metrics.json"))
        paths = settings["data.path"] or settings["data.name"]
        text = ", ".join(Path(path).name for path in ([paths] if isinstance(paths, str) else paths))
        best_loss = metrics["best_val_loss"]  # if it is 0, the last loss may be 0 too
        bits = round(best_loss * metrics["val_bits_per_byte"] / metrics["val_loss"], 4) if best_loss else 0.0
        eval_results = [EvalResult("text-generation", text, f"{text}, held out", "bits_per_byte", bits)]
        training = f" Trained on {text}. On a part that was held out, it needs {bits} bits per byte."
    tags: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["gpt2"]}
    front_matter = ModelCardData(model_name=name, eval_results=eval_results, **tags).to_yaml().strip()
    layers = f"{config.num_layers} layers, {config.num_heads} heads, {config.d_model} channels"
    shape = f"{config.num_parameters:,} parameters ({layers}) and a context of {config.context_length} tokens"
    card = CARD_TEMPLATE.format(front_matter=front_matter, name=name, shape=shape, training=training)
    write_text(folder / "README.md", card)
