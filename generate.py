"""Sample text from a trained model: python generate.py --prompt "..." """

import argparse
import sys

from gpt.console import clean_exit, print_line
from gpt.errors import UserError
from gpt.files import write_text
from gpt.sampling.arguments import parse_arguments, read_prompts


def main(arguments: list[str] | None = None) -> None:
    """Run the command, with the options of `sys.argv` by default."""
    args = parse_arguments(arguments)
    # Importing torch takes seconds. A mistake in the options is reported before that.
    from gpt.hardware.threads import limit_threads

    with limit_threads():
        sample(args)


def sample(args: argparse.Namespace) -> None:
    """Open a model, continue the prompts, and print the texts."""
    import torch

    from gpt.data import dataset_cache
    from gpt.data.token_dataset import find_cached_dataset, list_caches
    from gpt.hardware.device import choose_device
    from gpt.loading import find_checkpoint, open_checkpoint
    from gpt.sampling.insight import insight_page
    from gpt.sampling.language_model import LanguageModel
    from gpt.sampling.packed import choose_sampling_precision, choose_threads, pack_weights
    from gpt.sampling.printing import format_copies, print_json, print_samples, print_stream
    from gpt.sampling.session import Session, repl, sampling_params

    sampling = sampling_params(args)
    device = choose_device(args.device)
    prompts = [] if args.interactive else [prompt for prompt in read_prompts(args) for _ in range(args.num_samples)]
    path = find_checkpoint(args.checkpoint)
    model, tokenizer, checkpoint = open_checkpoint(path)
    sources = find_cached_dataset(checkpoint, tokenizer, dataset_cache.DEFAULT_CACHE) if args.check else []
    if args.check and not sources:
        caches = " or ".join(map(str, list_caches(checkpoint, dataset_cache.DEFAULT_CACHE)))
        raise UserError(f"--check: the text that {path} was trained on is not in {caches}: leave --check out")
    precision = choose_sampling_precision(args.precision, model.to(device))
    rows = len(prompts) or args.num_samples
    torch.set_num_threads(choose_threads(model, rows, args.compile))
    pack_weights(model, precision, rows, args.compile)

    seed = args.seed if args.seed is not None else torch.Generator().seed() >> 33  # short enough to type
    session = Session(LanguageModel(model, tokenizer), torch.Generator(device).manual_seed(seed), args)
    print_line(f"generate.py: sampling {path} with seed {seed}", sys.stderr)
    if args.interactive:
        repl(session)
        return
    steps = session.complete(prompts)
    if args.json:
        print_json(prompts, steps, {"checkpoint": str(path), "seed": seed, "sampling": vars(sampling)})
        return
    if len(prompts) > 1:
        print_samples(prompts, steps, sources)
        return
    print(prompts[0], end="", flush=True)
    *_, (completion,) = print_stream(steps)
    print(format_copies(completion.tokens, sources), end="")
    if args.insight:
        ids = tokenizer.encode(prompts[0])
        metadata = {"checkpoint": str(path), "seed": seed} | vars(sampling)
        write_text(args.insight, insight_page(model, tokenizer, ids, completion.tokens, sampling, metadata))
        size = args.insight.stat().st_size
        print_line(f"generate.py: wrote {args.insight} ({size:,} bytes): open it in a browser", sys.stderr)


if __name__ == "__main__":
    with clean_exit("generate.py", "lower --num-samples, --max-new-tokens or --precision"):
        main()
