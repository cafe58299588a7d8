"""The model card of an export: README.md, whose front matter the Hugging Face hub reads."""

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from gpt.files import flatten, read_text, read_yaml, write_text

if TYPE_CHECKING:
    from gpt.model.transformer import GPT

CARD = """---
{front}---

# {name}

A GPT-2 of {parameters:,} parameters: {layers} layers, {heads} heads, {channels} channels, {context} tokens of context.
{trained}It continues a text, and does not answer.

```python
from transformers import pipeline

print(pipeline("text-generation", model="{name}")("The")[0]["generated_text"])
```

Which licence it has is for you to say, and depends on its text: add `license: ...` above.
"""


def write(model: "GPT", checkpoint: Path, name: str, folder: Path) -> None:
    """Write the card of a model; of a run, also on which text it was trained, and how well it predicts that."""
    from huggingface_hub import EvalResult, ModelCardData

    trained, results = "", None
    run = checkpoint.parent.parent
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # no run, or one without a validation
        config = flatten(read_yaml(run / "config.yaml"))
        figures = json.loads(read_text(run / "metrics.json"))
        paths = config["data.path"] or config["data.name"]
        text = ", ".join(Path(path).name for path in ([paths] if isinstance(paths, str) else paths))
        bits = figures["best_val_loss"] * figures["val_bits_per_byte"] / figures["val_loss"]
        trained = (
            f"Trained on {text} for {figures['steps']:,} steps ({figures['epochs']:.2f} epochs); on a part that was "
            f"held out, its best checkpoint needs {bits:.4f} bits per byte.\n"
        )
        results = [
            EvalResult(
                task_type="text-generation",
                dataset_type=text,
                dataset_name=f"{text}, held out",
                metric_type="bits_per_byte",
                metric_name="bits per byte",
                metric_value=round(bits, 4),
            )
        ]
    data = ModelCardData(
        model_name=name,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["gpt2"],
        eval_results=results,
    )
    shape = model.config
    numbers = {"parameters": shape.num_parameters, "layers": shape.num_layers, "heads": shape.num_heads}
    numbers |= {"channels": shape.d_model, "context": shape.context_length}
    words = {"front": f"{data.to_yaml()}\n".replace("\n\n", "\n"), "name": name, "trained": trained}
    write_text(folder / "README.md", CARD.format(**numbers, **words))
