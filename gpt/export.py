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
from gpt.interop import gguf, huggingface, model_card
from gpt.loading import find_checkpoint, open_model

if TYPE_CHECKING:  # torch takes seconds to import; `main` imports it once the arguments have proved right
    from gpt.model.transformer import GPT

COMPARED_LOGITS = 1024  # positions: two cores need seconds for them in GPT-2 124M
# Of the largest logit. The two programs add the same fp32 numbers in other orders, which makes 1e-6 in the mini model
# and up to 4e-6 in GPT-2 124M. The smallest mistakes, an epsilon of 1e-6 or the other form of GELU, make 1e-4 or more.
TOLERANCE = 5e-5


def main(arguments: list[str] | None = None) -> None:
    """Write the model, compare what was written with the original, and print both."""
    args = parse_arguments(arguments)
    path = find_checkpoint(args.checkpoint)
    model, tokenizer = open_model(path)
    if args.to.suffix == ".gguf":
        gguf.write_gguf(model, tokenizer, args.to, args.type or "f32")
        print(f"{path} as {args.type or 'f32'}: {args.to}, {args.to.stat().st_size:,} bytes")
        print(f"run it:   llama-cli -m {shell_quote(str(args.to))}")
        return
    text = "\n".join(builtin_docs()) + "".join(token.decode("utf-8", "replace") for token in tokenizer.ranks)
    ids = tokenizer.encode(text)
    # Renamed into place only after every check has passed.
    with tempfile.TemporaryDirectory(prefix=f".{args.to.name}.", dir=args.to.parent) as working:
        folder = Path(working) / args.to.name
        folder.mkdir()
        huggingface.write_huggingface(model, tokenizer, folder)
        model_card.write_model_card(model, path, args.to.name, folder)
        compared = [compare_ids(tokenizer, folder, text, ids), compare_weights(model, tokenizer, folder)]
        compared.append(compare_logits(model, folder, ids))
        files = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
        for file in folder.iterdir():
            sync(file)
        try:
            atomic_rename(folder, args.to)
        except OSError:
            require_new(args.to)  # which another export may have made meanwhile
            raise
    print(f"{path}: written to {args.to}/ ({', '.join(files)}: {sum(files.values()):,} bytes)")
    print(f"compared: {'; '.join(compared)}; on Python's documentation and every token of the vocabulary")
    print(f"load it:  AutoModelForCausalLM.from_pretrained({str(args.to)!r})")
    print(
        f"share it: hf upload {shell_quote(args.to.name)} {shell_quote(str(args.to))}, "
        "once README.md there names a licence"
    )


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line, and check whatever can be checked before a model is loaded."""
    parser = Parser("python -m gpt.export", "Write a model for Hugging Face's transformers, or for llama.cpp.")
    add = parser.add_argument
    add("--checkpoint", metavar="PATH", help="a run, checkpoint, Hugging Face GPT-2 or hub name (default: newest run)")
    add("--to", metavar="PATH", type=expand_path, required=True, help="a new folder, or a new file that ends in .gguf")
    add(
        "--type",
        choices=gguf.GGUF_TYPES,
        help="how a .gguf file stores the weights (default: f32, which loses nothing)",
    )
    args = parser.parse_args(arguments)
    if args.type and args.to.suffix != ".gguf":
        raise UserError(f"--type={args.type} is for .gguf files, and the weights of a folder stay fp32: leave it out")
    require_new(args.to)
    if not os.path.isdir(args.to.parent):
        raise UserError(f"--to={args.to}: there is no folder {args.to.parent}: make it first")
    return args


def require_new(path: Path) -> None:
    """Raise `UserError` if there is anything of this name."""
    if os.path.lexists(path):
        raise UserError(f"--to={path} exists already: give another name, or move it away first")


def compare_ids(tokenizer: Tokenizer, folder: Path, text: str, ids: list[int]) -> str:
    """Say for how much text the written tokenizer gives our ids; `UserError` if they differ."""
    from tokenizers import Tokenizer as Written

    written = Written.from_file(str(folder / "tokenizer.json"))
    written.encode_special_tokens = True  # as text, which is all they are in ours
    if written.encode(text).ids != ids or written.get_vocab_size() != tokenizer.vocab_size:
        raise UserError("the exported tokenizer tokenizes differently, so nothing was written")
    return f"{len(ids):,} token ids are equal"


def compare_weights(model: "GPT", tokenizer: Tokenizer, folder: Path) -> str:
    """Read the folder as `--checkpoint` would; `UserError` if a bit of the model or the tokenizer has changed."""
    again, same = huggingface.load_huggingface(folder)
    state, shape = again.state_dict(), dict(vars(again.config), dropout=model.config.dropout)
    equal = all(weight.equal(state[name]) for name, weight in model.state_dict().items())
    if not equal or shape != vars(model.config) or same.to_dict() != tokenizer.to_dict():
        raise UserError("the exported weights or tokens are not the same when they are read back: nothing was written")
    return "the weights come back bit for bit"


def compare_logits(model: "GPT", folder: Path, ids: list[int]) -> str:
    """Say by how much the logits of `transformers` differ from ours; `UserError` if by more than rounding."""
    try:
        import transformers
    except ImportError:
        raise UserError("comparing logits needs transformers: pip install transformers") from None
    import torch

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32", local_files_only=True).eval()
    context, apart, sizes = model.config.context_length, [], []
    ids = ids[: max(context, COMPARED_LOGITS // context * context)]
    with torch.no_grad():
        for window in torch.tensor([ids]).split(context, dim=1):
            ours = model(window)
            apart.append((ours - theirs(window).logits).abs().max())
            sizes.append(ours.abs().max())
    difference, largest = float(torch.stack(apart).max()), float(torch.stack(sizes).max())
    where = f"{len(ids):,} positions in transformers {transformers.__version__}"
    if not difference <= TOLERANCE * largest:
        raise UserError(f"logits at {where} differ by {difference:.2g} of {largest:.2g}, so nothing was written")
    return f"logits at {where} differ by at most {difference:.1e} (the largest is {largest:.1f})"


if __name__ == "__main__":
    with clean_exit("gpt.export", memory="choose a machine with more"):
        main()
