"""Sample text from a trained model: python generate.py --prompt "..." """

import argparse
import functools
import sys

from gpt.console import clean_exit, print_line
from gpt.errors import UserError
from gpt.files import write_text
from gpt.sampling.arguments import parse_arguments, read_prompts


def main(arguments: list[str] | None = None) -> None:
    """Sample as the command line says."""
    args = parse_arguments(arguments)
    # Importing torch takes seconds, so that waits until the arguments have proved right.
    from gpt.hardware.threads import yield_to_other_processes

    with yield_to_other_processes():
        sample(args)


def sample(args: argparse.Namespace) -> None:
    """Load a model, read the prompts, and print how the model continues them."""
    import torch

    from gpt.data import dataset_cache
    from gpt.data.token_dataset import find_cached_dataset
    from gpt.hardware.device import choose_device
    from gpt.loading import find_checkpoint, open_checkpoint
    from gpt.sampling.generation import SamplingParams
    from gpt.sampling.insight import insight_page
    from gpt.sampling.language_model import LanguageModel
    from gpt.sampling.packed import choose_sampling_precision, choose_threads, pack_weights
    from gpt.sampling.printing import copied, interact, print_growing, print_json, print_several

    # What is asked for
    sampling = SamplingParams(args.repetition_penalty, args.temperature, args.top_k, args.top_p, args.min_p)
    device = choose_device(args.device)
    prompts = [] if args.interactive else [prompt for prompt in read_prompts(args) for _ in range(args.num_samples)]

    # The model, packed for these rows
    path = find_checkpoint(args.checkpoint)
    model, tokenizer, record = open_checkpoint(path)
    sources = find_cached_dataset(record, tokenizer, dataset_cache.DEFAULT_CACHE) if args.check else []
    if args.check and not sources:
        raise UserError(
            f"--check: the text that {path} was trained on is not in {dataset_cache.DEFAULT_CACHE}: leave --check out"
        )
    precision = choose_sampling_precision(args.precision, model.to(device))
    rows = len(prompts) or args.num_samples
    torch.set_num_threads(choose_threads(model, rows, args.compile))
    pack_weights(model, precision, rows, args.compile)

    # The text
    seed = args.seed if args.seed is not None else torch.Generator().seed() >> 33  # short enough to type
    print_line(f"generate.py: sampling {path} with seed {seed}", sys.stderr)
    generate_batch = functools.partial(
        LanguageModel(model, tokenizer).generate_batch,
        max_new_tokens=args.max_new_tokens,
        sampling=sampling,
        generator=torch.Generator(device).manual_seed(seed),
        slide=args.slide,
        stops=tuple(args.stop),
        top_logprobs=args.top_logprobs,
    )

    @functools.cache
    def encode(prompt: str) -> list[int]:
        """Return a prompt's tokens, with a note on stderr if the model cannot see them all."""
        ids, context = tokenizer.encode(prompt), model.config.context_length
        if (excess := len(ids) - context) > 0:
            note = f"the prompt has {len(ids)} tokens and the model sees {context}: the first {excess} are cut"
            print_line(f"generate.py: {note}", sys.stderr)
        return ids

    if args.interactive:
        interact(generate_batch, tokenizer.encode if args.keep_context else encode, args.num_samples, args.keep_context)
        return
    steps = generate_batch([encode(prompt) for prompt in prompts])
    if args.json:
        print_json(prompts, steps, {"checkpoint": str(path), "seed": seed, "sampling": vars(sampling)})
    elif len(prompts) == 1:
        print(prompts[0], end="", flush=True)
        *_, (text,) = print_growing(steps)
        print(copied(text.tokens, sources), end="")
        if args.insight:
            facts = {"checkpoint": str(path), "seed": seed} | vars(sampling)
            write_text(args.insight, insight_page(model, tokenizer, encode(prompts[0]), text.tokens, sampling, facts))
            size = args.insight.stat().st_size
            print_line(f"generate.py: wrote {args.insight} ({size:,} bytes): open it in a browser", sys.stderr)
    else:
        print_several(prompts, steps, sources)


if __name__ == "__main__":
    with clean_exit("generate.py", "lower --num-samples, --max-new-tokens or --precision"):
        main()
