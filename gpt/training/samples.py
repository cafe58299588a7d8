"""What a person looks at while a model learns: its text, and where it attends."""

from pathlib import Path

import torch
from lightning import Trainer

from gpt.sampling.generation import Sampling, TextStream, generate
from gpt.sampling.scoring import Score
from gpt.training.curves import Curves
from gpt.training.module import GPTModule
from gpt.training.steps import StepCallback

SAMPLE_TOKENS = 120
ATTENTION_TOKENS = 64


class Samples(StepCallback):
    """Continues the fixed prompts after each validation, with the same seed, so that only the model differs."""

    def __init__(self, run_dir: Path, curves: Curves):
        self._file, self._curves = run_dir / "samples.md", curves

    def on_validated(self, trainer: Trainer, module: GPTModule, step: int, score: Score) -> None:
        if not trainer.is_global_zero:
            return
        generator = torch.Generator(module.device).manual_seed(module.config.seed)
        with torch.compiler.set_stance("force_eager"):  # compiling for lengths that vary does not pay
            texts = [self._continue(module, prompt, generator) for prompt in module.config.data.prompts or []]
        module.model.train()
        text = "\n\n---\n\n".join(texts)
        if self._curves.writer is not None:
            self._curves.writer.add_text("samples", text, step)
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(f"## Step {step}\n\n{text}\n\n")

    def _continue(self, module: GPTModule, prompt: str, generator: torch.Generator) -> str:
        tokenizer = module.corpora.tokenizer
        ids = (tokenizer.encode(prompt) or [tokenizer.end_of_text])[-module.config.model.context_length :]
        out = TextStream(tokenizer)
        idx = torch.tensor([ids], device=module.device)
        for token in generate(module.model, idx, SAMPLE_TOKENS, Sampling(), generator):
            out.feed(int(token))
            if out.finish_reason:
                break
        out.finish()
        return f"**{prompt}**{out.text}" if prompt else out.text


class AttentionMaps(StepCallback):
    """Draws a picture of each layer after each validation: heads side by side, queries in rows, darker for more."""

    def __init__(self, curves: Curves):
        self._curves = curves

    def on_validated(self, trainer: Trainer, module: GPTModule, step: int, score: Score) -> None:
        if self._curves.writer is None:
            return
        text = module.corpora.sources[0].validation
        T = min(ATTENTION_TOKENS, module.config.model.context_length, len(text))
        idx = torch.from_numpy(text[:T].astype("int64"))[None].to(module.device)
        model = module.model.eval()
        with torch.compiler.set_stance("force_eager"):
            maps = model.attention_maps(idx)[0].float().cpu()  # (L, H, T, T)
        model.train()
        for layer, heads in enumerate(maps):
            framed = torch.nn.functional.pad(heads.sqrt(), (1, 1, 1, 1), value=0.3)  # (H, T + 2, T + 2)
            picture = 1.0 - torch.cat(list(framed), dim=1)
            picture = picture.repeat_interleave(3, 0).repeat_interleave(3, 1)
            self._curves.writer.add_image(f"attention/layer_{layer}", picture, step, dataformats="HW")
