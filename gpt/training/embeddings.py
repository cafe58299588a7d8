"""The token embeddings, for TensorBoard's projector."""

from pathlib import Path

import numpy as np
import torch
from lightning import Trainer

from gpt.files import replacing
from gpt.sampling.scoring import Score
from gpt.text.pieces import label
from gpt.text.references import sample
from gpt.text.shards import Corpora
from gpt.training.curves import Curves
from gpt.training.module import GPTModule
from gpt.training.steps import StepCallback

FOLDER = "embeddings"
CONFIG = "projector_config.pbtxt"  # the name and the place that TensorBoard looks for
MOST_TOKENS = 4096
COUNTED = 1 << 20  # training tokens that tell which are frequent


class Embeddings(StepCallback):
    """Writes the embeddings of the most frequent tokens after each validation, in place of the last ones."""

    def __init__(self, run_dir: Path, curves: Curves):
        self._run_dir, self._folder, self._curves = run_dir, run_dir / FOLDER, curves
        self._ids = np.empty(0, np.int64)

    def on_validated(self, trainer: Trainer, module: GPTModule, step: int, score: Score) -> None:
        if self._curves.writer is None:
            return
        self._folder.mkdir(exist_ok=True)
        first = not len(self._ids)
        if first:
            self._ids = frequent(module.corpora, MOST_TOKENS)
        rows = module.model.token_embedding.weight.detach()[torch.from_numpy(self._ids).to(module.device)]
        with replacing(self._folder / "tokens.bytes") as file:
            rows.float().cpu().numpy().tofile(file)
        if first:
            self._describe(module)

    def _describe(self, module: GPTModule) -> None:
        """Say what the rows are, which never changes in a run. TensorBoard looks for the rows once it is said."""
        tokenizer = module.corpora.tokenizer
        labels = [label(tokenizer.decode_bytes([i])) for i in self._ids.tolist()]
        (self._folder / "tokens.tsv").write_text("\n".join(labels) + "\n", encoding="utf-8", newline="\n")
        shape = f"tensor_shape: {len(self._ids)} tensor_shape: {module.config.model.d_model}"
        paths = f'tensor_path: "{FOLDER}/tokens.bytes" metadata_path: "{FOLDER}/tokens.tsv"'
        content = f'embeddings {{ tensor_name: "token_embedding" {shape} {paths} }}\n'
        (self._run_dir / CONFIG).write_text(content, encoding="utf-8", newline="\n")


def frequent(corpora: Corpora, count: int) -> np.ndarray:
    """The ids of the `count` most frequent tokens of the training text, or of all, most frequent first."""
    V = corpora.tokenizer.vocab_size
    texts = [sample(source.train, COUNTED // len(corpora.sources)) for source in corpora.sources]
    counts = np.bincount(np.concatenate([text.ravel() for text in texts]), minlength=V)
    return np.argsort(-counts, kind="stable")[:count]
