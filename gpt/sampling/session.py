"""A session of generate.py: a model, the options of the command line, and one prompt after another."""

import argparse
import dataclasses
import io
import re
import sys
from collections.abc import Iterator

import torch

from gpt.console import print_line
from gpt.errors import UserError
from gpt.sampling.arguments import parse_arguments
from gpt.sampling.generation import SamplingParams
from gpt.sampling.language_model import Completion, LanguageModel
from gpt.sampling.printing import format_completion, print_stream

OPTION_LINE = re.compile(r"/([A-Za-z][\w-]*)(?:\s+|$)(\S*)\s*")  # /top-k 5 sets an option; /usr/bin is a prompt
SESSION_OPTIONS = ("max_new_tokens", *(field.name for field in dataclasses.fields(SamplingParams)))


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Return the options that choose the next token; `UserError` if one is out of range."""
    return SamplingParams(args.repetition_penalty, args.temperature, args.top_k, args.top_p, args.min_p)


@dataclasses.dataclass
class Session:
    """A model on its device, a generator of random numbers, and options. `set_option` changes the options."""

    model: LanguageModel
    generator: torch.Generator
    args: argparse.Namespace

    def complete(self, prompts: list[str]) -> Iterator[list[Completion]]:
        """Continue all prompts at once: yield the same list of completions after each token.

        A note on stderr names a prompt's length if the model cannot see all of it.
        """
        ids = {prompt: self.model.tokenizer.encode(prompt) for prompt in prompts}
        context_length = self.model.model.config.context_length
        for tokens in ids.values():
            excess = len(tokens) - context_length
            if excess > 0 and not self.args.keep_context:
                note = f"the prompt has {len(tokens)} tokens and the model sees {context_length}"
                print_line(f"generate.py: {note}: the first {excess} are cut", sys.stderr)
        return self.model.generate_batch(
            [ids[prompt] for prompt in prompts],
            self.args.max_new_tokens,
            sampling_params(self.args),
            self.generator,
            slide=self.args.slide,
            stops=tuple(self.args.stop),
            top_logprobs=self.args.top_logprobs,
        )

    def set_option(self, name: str, value: str) -> None:
        """Change an option, such as `top-k`. `UserError` if there is none of this name, or the value is not valid."""
        if name.replace("-", "_") not in SESSION_OPTIONS:
            names = " /".join(SESSION_OPTIONS).replace("_", "-")
            raise UserError(f"/{name} is no option: choose from /{names}")
        option = f"--{name.replace('_', '-')}={value}"
        args = parse_arguments([option], argparse.Namespace(**vars(self.args)))
        sampling_params(args)
        self.args = args


def repl(session: Session) -> None:
    """Read prompts and continue each. Ctrl-C ends a text, Ctrl-D the session. `/top-k 5` sets an option."""
    if sys.stdin.isatty():
        keys = "Ctrl-D (on Windows Ctrl-Z and Enter) leaves, Ctrl-C ends a text"
        print_line(f"{keys}, and a line such as /temperature 0.5 changes an option", sys.stderr)
    if isinstance(sys.stdin, io.TextIOWrapper):
        # As for other prompts, in every locale and with the line ends of every system.
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="replace", newline=None)
    text = ""  # with --keep-context all prompts and completions of the document, else the latest
    while True:
        try:
            prompt = input("> ")
        except EOFError:
            print()
            return
        if option := OPTION_LINE.fullmatch(prompt):
            try:
                session.set_option(*option.groups())
            except UserError as error:
                print_line(str(error), sys.stderr)
            continue
        text = f"{text}\n{prompt}" if session.args.keep_context and text and prompt else prompt
        steps = session.complete([text] * session.args.num_samples)
        try:
            if session.args.num_samples > 1:
                *_, completions = steps
                print("\n---\n".join(map(format_completion, completions)))
            else:
                context = text
                for (completion,) in print_stream(steps):
                    text = context + completion.text
        except KeyboardInterrupt:
            print()
