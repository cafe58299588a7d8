"""What TensorBoard shows of the weights: a picture of what every head attends to, and the embeddings of the tokens."""

from pathlib import Path

import numpy as np
import torch
from lightning import Trainer

from gpt.files import replacing, write_text
from gpt.sampling.pictures import attention_picture
from gpt.sampling.scoring import Score
from gpt.text.analysis.references import sample
from gpt.text.pieces import kind, label
from gpt.text.prepared import Corpora
from gpt.training.callbacks.base import StepCallback
from gpt.training.metrics.curves import Curves
from gpt.training.module import GPTModule

TOKENS = 32
FOLDER = "embeddings"
CONFIG = "projector_config.pbtxt"  # the name and the place that TensorBoard looks for
MOST_TOKENS = 4096
COUNTED = 1 << 20  # training tokens that tell which are frequent


class AttentionMaps(StepCallback):
    """Draws all heads after each validation, always on the first tokens of the validation text."""

    def __init__(self, curves: Curves):
        self._curves = curves

    def on_validated(self, trainer: Trainer, module: GPTModule, step: int, score: Score) -> None:
        if self._curves.writer is None:
            return
        text = module.corpora.sources[0].validation
        ids = text[: min(TOKENS, module.config.model.context_length, len(text))].tolist()
        model = module.model.eval()
        with torch.compiler.set_stance("force_eager"):
            maps = model.attention_maps(torch.tensor([ids], device=module.device))[0].float().cpu()
        model.train()
        self._curves.writer.add_image("weights/attention", attention_picture(maps.numpy()), step, dataformats="HWC")


class Embeddings(StepCallback):
    """Writes the embeddings of the most frequent tokens after each validation, in place of the last ones."""

    def __init__(self, run_dir: Path, curves: Curves):
        self._run_dir, self._curves = run_dir, curves
        self._ids: list[int] = []

    def on_validated(self, trainer: Trainer, module: GPTModule, step: int, score: Score) -> None:
        if self._curves.writer is None:
            return
        folder, tokenizer = self._run_dir / FOLDER, module.corpora.tokenizer
        folder.mkdir(exist_ok=True)
        self._ids = self._ids or frequent(module.corpora)
        with replacing(folder / "tokens.bytes") as file:
            weights = module.model.token_embedding.weight.detach().float().cpu()[self._ids]
            file.write_bytes(weights.numpy().tobytes())  # numpy's own error does not say that the disk is full
        tokens = [tokenizer.decode_bytes([i]) for i in self._ids]
        rows = ["token\tkind", *(f"{label(token)}\t{kind(token)}" for token in tokens)]
        write_text(folder / "tokens.tsv", "\n".join(rows) + "\n")
        shape = f"tensor_shape: {len(self._ids)} tensor_shape: {module.config.model.d_model}"
        paths = f'tensor_path: "{FOLDER}/tokens.bytes" metadata_path: "{FOLDER}/tokens.tsv"'
        content = f'embeddings {{ tensor_name: "token_embedding" {shape} {paths} }}\n'
        write_text(self._run_dir / CONFIG, content)  # last: TensorBoard looks for the others once it is there


def frequent(corpora: Corpora) -> list[int]:
    """The ids of at most `MOST_TOKENS` tokens of the training text, most frequent first."""
    V = corpora.tokenizer.vocab_size
    texts = [sample(source.at_hand, COUNTED // len(corpora.sources)) for source in corpora.sources]
    counts = np.bincount(np.concatenate([text.ravel() for text in texts]), minlength=V)
    return np.argsort(-counts, kind="stable")[:MOST_TOKENS].tolist()
