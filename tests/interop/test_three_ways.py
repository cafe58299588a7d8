"""One model gives the same in three programs: here, in `transformers` after export, and in llama.cpp as a GGUF file."""

import functools
import random
import shutil
import unicodedata
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from gpt.data.tokenizer import GPT2_PATTERN, Tokenizer, byte_tokenizer, gpt2_tokenizer
from gpt.interop.gguf import write_gguf
from gpt.interop.huggingface import write_huggingface
from gpt.loading import open_model
from gpt.model.transformer import GPT, GPTConfig
from gpt.sampling.generation import SamplingParams, generate
from harness import ROOT, train

pytestmark = pytest.mark.slow
MAX_NEW_TOKENS = 100
PROMPT = "Permission is hereby"
SKIPPED = "llama.cpp WAS NOT COMPARED: pip install llama-cpp-python, which needs a C++ compiler and some minutes"


def open_llama(file: Path, context_length: int, **options):
    """Open a GGUF file in llama.cpp, with the keys and values of its cache in fp32, as ours are.

    It takes one token at a time, because its code for several (AMX) crashes with q8_0 on some virtual machines.
    """
    llama_cpp = pytest.importorskip("llama_cpp", reason=SKIPPED)
    sizes = {"n_ctx": context_length, "n_batch": 1, "n_threads": 2, "n_threads_batch": 2}
    return llama_cpp.Llama(str(file), **sizes, type_k=0, type_v=0, verbose=False, **options)


def make_random_model(config: GPTConfig, seed: int) -> GPT:
    """Return a model with large random weights, biases and gains; GPT-2's initial weights repeat one token for ever.

    Attention weights are small, because sharp attention would multiply the differences between the programs' roundings.
    """
    generator = torch.Generator().manual_seed(seed)
    model = GPT(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            scale = 0.04 if "W_qkv" in name else 0.1
            parameter.copy_(mean + scale * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def make_model(name: str, folder: Path) -> tuple[GPT, Tokenizer]:
    """Return a random model, or the mini model after some steps on a text that it memorizes."""
    if name == "odd":
        config = GPTConfig(97, 60, 3, 5, qkv_bias=False, vocab_size=257)
        return make_random_model(config, seed=13), byte_tokenizer()
    if name == "gpt2":
        return make_random_model(GPTConfig(1024, 768, 12, 12), seed=21), gpt2_tokenizer()
    run = folder / "run"
    data = ["data=text", f"data.path={ROOT / 'LICENSE'}", f"data.cache={folder / 'cache'}", f"run_dir={run}"]
    train(*data, "tokenizer.vocab_size=307", "horizon=80steps", "trainer.device=cpu")
    return open_model(run / "checkpoints/last.ckpt")  # the best on validation has learnt less


@pytest.mark.parametrize("name", ["mini", "odd", "gpt2"])
def test_greedy_tokens_are_equal(tmp_path, name):
    """A hundred tokens, or as many as the context holds.

    llama.cpp looks GELU up in a table of f16, so its logits differ in the fourth digit. The two most probable tokens of
    a random model are sometimes nearly equal. With these seeds, their logits differ by more than twice that error, as
    they do after training.
    """
    model, tokenizer = make_model(name, tmp_path)
    prompt = tokenizer.encode(PROMPT)
    num_new = min(MAX_NEW_TOKENS, model.config.context_length - len(prompt))
    greedy = SamplingParams(temperature=0.0)
    new_ids = [int(token) for token in generate(model, torch.tensor([prompt]), num_new, greedy)]
    assert len(set(new_ids)) > 10
    ids = [*prompt, *new_ids]
    first = len(prompt) - 1  # the position that predicts the first new token
    with torch.inference_mode():
        logits = model(torch.tensor([ids[:-1]]))[0, first:].numpy()  # (num_new, V)

    folder, file = tmp_path / "folder", tmp_path / "model.gguf"
    folder.mkdir()
    write_huggingface(model, tokenizer, folder)
    gpt2 = AutoModelForCausalLM.from_pretrained(folder)
    gpt2.generation_config.eos_token_id = None  # to generate all tokens
    idx = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(idx), "do_sample": False, "max_length": len(ids), "pad_token_id": 0}
    assert gpt2.generate(idx, **options)[0].tolist() == ids

    write_gguf(model, tokenizer, file, "f32")
    llama = open_llama(file, model.config.context_length, logits_all=True)
    assert list(islice(llama.generate(prompt, temp=0.0), num_new)) == new_ids
    llama.reset()
    llama.eval(ids[:-1])
    error = np.abs(llama.scores[first : len(ids) - 1] - logits).max()
    second_best, best = np.partition(logits, -2)[:, -2:].T
    assert 2 * error < min((best - second_best).min(), 0.01 * logits.std())
    shutil.rmtree(folder)  # a gigabyte, with the file, which pytest would keep
    file.unlink()


def test_llama_cpp_reads_every_type(tmp_path):
    """The errors of its logits are as large as the rounding of the type. A chat is continued without markup."""
    model, tokenizer = make_random_model(GPTConfig(97, 96, 2, 3, vocab_size=257), seed=5), byte_tokenizer()
    ids = tokenizer.encode("The model reads\n bytes.")
    with torch.inference_mode():
        logits = model(torch.tensor([ids]))[0].numpy()
    for gguf_type, bound in (("f32", 0.002), ("f16", 0.004), ("bf16", 0.02), ("q8_0", 0.05)):
        file = tmp_path / f"{gguf_type}.gguf"
        write_gguf(model, tokenizer, file, gguf_type)
        llama = open_llama(file, 97, logits_all=True)
        llama.eval(ids)
        error = np.abs(llama.scores[: len(ids)] - logits).std() / logits.std()
        assert bound / 100 < error < bound, gguf_type
    turns = [("user", "The model "), ("assistant", "reads"), ("user", "\n bytes.")]
    messages = [{"role": role, "content": content} for role, content in turns]
    chat = llama.create_chat_completion(messages, temperature=0.0, max_tokens=7)
    completion = llama.create_completion("The model reads\n bytes.", temperature=0.0, max_tokens=7)
    assert chat["choices"][0]["message"]["content"] == completion["choices"][0]["text"]
    assert chat["usage"] == completion["usage"]


def make_byte_pairs() -> Tokenizer:
    """Return a tokenizer whose tokens are all pairs of bytes, so that every other split of a text gives other ids."""
    single_bytes = [bytes([byte]) for byte in range(256)]
    tokens = single_bytes + [left + right for left in single_bytes for right in single_bytes]
    return Tokenizer("bpe", {token: rank for rank, token in enumerate(tokens)}, GPT2_PATTERN)


@functools.cache
def make_mixed_text(length: int) -> str:
    """Return text of all of Unicode: contractions, runs of spaces, scripts, marks, emoji and control characters.

    Characters that this Python does not know are left out: llama.cpp's tables are of Unicode 15, tiktoken's are newer.
    """
    pools = [
        [" the", " model's", "don't", "I'll", "we've 're", "'LL", "''s", " 'm", "x=1", "<|endoftext|>", "thethe"],
        list("0123456789\u0664\u096c\u00bd\u2167\u2460"),
        list("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~\u2019\u2026\u20ac"),
        list("\t\n\v\f\r \x1c\x85\xa0\u1680\u2003\u200b\u2028\u2029\u202f\u205f\u3000\ufeff"),
        [" "],
        [chr(code) for code in range(0x4E00, 0xA000)],
        [chr(code) for code in range(0xAC00, 0xD7A4)],
        [chr(code) for start in (0x300, 0x590, 0x600, 0x900, 0xE00) for code in range(start, start + 0x70)],
        ["\U0001f642", "\U0001f44d\U0001f3fd", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u2764\ufe0f"],
        [chr(code) for code in range(0x110000)],
    ]
    rng = random.Random(7)
    characters: list[str] = []
    while len(characters) < length:
        text = "".join(rng.choices(rng.choice(pools), k=rng.choice((1, 1, 2, 3, 5, 7))))
        characters += [character for character in text if unicodedata.category(character) not in ("Cn", "Cs")]
    return "".join(characters)


@pytest.mark.parametrize("make_tokenizer", [gpt2_tokenizer, byte_tokenizer, make_byte_pairs])
def test_token_ids_are_equal(tmp_path, make_tokenizer):
    """A million characters give equal ids. The exception is letters newer than llama.cpp's tables."""
    tokenizer, file = make_tokenizer(), tmp_path / "model.gguf"
    write_gguf(GPT(GPTConfig(8, 8, 1, 1, vocab_size=tokenizer.vocab_size)), tokenizer, file, "f32")
    llama = open_llama(file, 8, vocab_only=True)

    def encode(text: str, special: bool = False) -> list[int]:
        return llama.tokenize(text.encode(), add_bos=False, special=special)

    text = make_mixed_text(1_000_000)
    for start in range(0, len(text), 9973):
        part = text[start : start + 9973]
        assert encode(part) == tokenizer.encode(part)
    new_letters = "a\u1c89a 1\U0001ccf01"  # a Cyrillic letter and a digit of Unicode 16
    assert (encode(new_letters) == tokenizer.encode(new_letters)) == (make_tokenizer is not make_byte_pairs)
    assert encode("<|endoftext|>") == tokenizer.encode("<|endoftext|>")
    assert encode("<|endoftext|>", special=True) == [tokenizer.end_of_text]  # llama.cpp's programs read prompts so
