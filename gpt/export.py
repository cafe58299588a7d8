"""The command `python -m gpt.export`: write a model for `transformers`, or for llama.cpp and Ollama."""

import argparse
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from gpt.console import Parser, clean_exit, shell_quote
from gpt.data.python_docs import builtin_docs
from gpt.data.tokenizer import Tokenizer
from gpt.errors import UserError
from gpt.files import atomic_rename, expand_path, sync
from gpt.interop.gguf import GGUF_TYPES, write_gguf
from gpt.interop.huggingface import load_huggingface, set_activation_function, write_huggingface
from gpt.interop.model_card import write_model_card
from gpt.interop.nanogpt import is_nanogpt
from gpt.loading import find_checkpoint, open_checkpoint

if TYPE_CHECKING:  # torch takes seconds to import; `main` imports it after it has checked the arguments
    from gpt.model.transformer import GPT

NUM_COMPARED_LOGITS = 1024  # positions: two cores need seconds for them in GPT-2 124M
# As a fraction of the largest logit. The two programs add the same fp32 numbers in different orders. The difference is
# 1e-6 in the mini model, and up to 4e-6 in GPT-2 124M. An epsilon of 1e-6 or the other form of GELU makes 1e-4 or more.
LOGITS_TOLERANCE = 5e-5


def main(arguments: list[str] | None = None) -> None:
    """Write the model and print where it is."""
    args = parse_arguments(arguments)
    path = find_checkpoint(args.checkpoint)
    model, tokenizer, checkpoint = open_checkpoint(path)
    if args.to.suffix == ".gguf":
        gguf_type = args.type or "f32"
        write_gguf(model, tokenizer, args.to, gguf_type)
        print(f"{path} as {gguf_type}: {args.to}, {args.to.stat().st_size:,} bytes")
        print(f"run it:   llama-cli -m {shell_quote(str(args.to))}")
    else:
        export_folder(model, tokenizer, path, args.to, has_exact_gelu=is_nanogpt(checkpoint))


def export_folder(model: "GPT", tokenizer: Tokenizer, path: Path, target: Path, has_exact_gelu: bool = False) -> None:
    """Write a folder for `transformers`, compare it with the model, and print the results.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        path: Where the model was opened; the model card describes that run.
        target: The folder. It appears only after every check has passed.
        has_exact_gelu: Whether the weights were trained with the exact GELU. The folder then names it, and all that is
            compared is compared with our own.
    """
    text = "\n".join(builtin_docs()) + "".join(token.decode("utf-8", "replace") for token in tokenizer.ranks)
    ids = tokenizer.encode(text)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as parent:
        folder = Path(parent) / target.name
        folder.mkdir()
        write_huggingface(model, tokenizer, folder)
        write_model_card(model, path, target.name, folder)
        results = [
            compare_ids(tokenizer, folder, text, ids),
            compare_weights(model, tokenizer, folder),
            compare_logits(model, folder, ids),
        ]
        if has_exact_gelu:
            set_activation_function(folder, "gelu")
        sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
        for file in folder.iterdir():
            sync(file)
        try:
            atomic_rename(folder, target)
        except OSError:
            require_new(target)  # another export may have taken the name
            raise
    print(f"{path}: written to {target}/ ({', '.join(sizes)}: {sum(sizes.values()):,} bytes)")
    print(f"compared: {'; '.join(results)}; on Python's documentation and every token of the vocabulary")
    print(f"load it:  AutoModelForCausalLM.from_pretrained({str(target)!r})")
    name, folder_name = shell_quote(target.name), shell_quote(str(target))
    print(f"share it: hf upload {name} {folder_name}, once README.md there names a licence")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line, and check whatever can be checked before a model is loaded."""
    parser = Parser("python -m gpt.export", "Write a model for Hugging Face's transformers, or for llama.cpp.")
    add = parser.add_argument
    add("--checkpoint", metavar="PATH", help="a run, checkpoint, Hugging Face GPT-2 or hub name (default: newest run)")
    add("--to", metavar="PATH", type=expand_path, required=True, help="a new folder, or a new file that ends in .gguf")
    add("--type", choices=GGUF_TYPES, help="how a .gguf file stores the weights (default: f32, which loses nothing)")
    args = parser.parse_args(arguments)
    if args.type and args.to.suffix != ".gguf":
        raise UserError(f"--type={args.type} is for .gguf files, and the weights of a folder stay fp32: leave it out")
    require_new(args.to)
    if not os.path.isdir(args.to.parent):
        raise UserError(f"--to={args.to}: there is no folder {args.to.parent}: make it first")
    return args


def require_new(path: Path) -> None:
    """Raise `UserError` if something has this name."""
    if os.path.lexists(path):
        raise UserError(f"--to={path} exists already: give another name, or move it away first")


def compare_ids(tokenizer: Tokenizer, folder: Path, text: str, ids: list[int]) -> str:
    """Return the result to print; `UserError` if the exported tokenizer does not give a text our ids."""
    import tokenizers

    exported = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    exported.encode_special_tokens = True  # as text, because our tokenizer has no special tokens in text
    if exported.encode(text).ids != ids or exported.get_vocab_size() != tokenizer.vocab_size:
        raise UserError("the exported tokenizer tokenizes differently, so nothing was written")
    return f"{len(ids):,} token ids are equal"


def compare_weights(model: "GPT", tokenizer: Tokenizer, folder: Path) -> str:
    """Return the result to print; `UserError` if reading the folder changes a bit of the model or the tokenizer."""
    loaded_model, loaded_tokenizer = load_huggingface(folder)
    state = loaded_model.state_dict()
    config = dict(vars(loaded_model.config), dropout=model.config.dropout)
    are_weights_equal = all(weight.equal(state[name]) for name, weight in model.state_dict().items())
    is_rest_equal = config == vars(model.config) and loaded_tokenizer.to_dict() == tokenizer.to_dict()
    if not (are_weights_equal and is_rest_equal):
        raise UserError("the exported weights or tokens are not the same when they are read back: nothing was written")
    return "the weights come back bit for bit"


def compare_logits(model: "GPT", folder: Path, ids: list[int]) -> str:
    """Return the result to print; `UserError` if the logits of `transformers` differ by more than rounding."""
    try:
        import transformers
    except ImportError:
        raise UserError("comparing logits needs transformers: pip install transformers") from None
    import torch

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    exported = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32", local_files_only=True).eval()
    context_length = model.config.context_length
    ids = ids[: max(context_length, NUM_COMPARED_LOGITS // context_length * context_length)]
    differences, sizes = [], []
    with torch.no_grad():
        for idx in torch.tensor([ids]).split(context_length, dim=1):  # (1, T)
            logits = model(idx)  # (1, T, V)
            differences.append((logits - exported(idx).logits).abs().max())
            sizes.append(logits.abs().max())
    difference, largest = float(torch.stack(differences).max()), float(torch.stack(sizes).max())
    compared = f"logits at {len(ids):,} positions in transformers {transformers.__version__}"
    if not difference <= LOGITS_TOLERANCE * largest:
        raise UserError(f"{compared} differ by {difference:.2g} of {largest:.2g}, so nothing was written")
    return f"{compared} differ by at most {difference:.1e} (the largest is {largest:.1f})"


if __name__ == "__main__":
    with clean_exit("gpt.export", memory_hint="choose a machine with more"):
        main()
