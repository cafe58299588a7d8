"""Prepare a text in shards for train.py data=prepared: `python -m gpt.prepare`, or from Python on any executor.

`prepare` does all of it. Of its steps, `plan` comes first and `join` last; between them `encode` makes one shard, in
any order, on any machine, and as often as one likes.
"""

import argparse
import contextlib
import multiprocessing
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

from gpt.console import Parser, command_line, progress_bar, say
from gpt.errors import UserError, reason
from gpt.files import home_path
from gpt.text.cache import CACHE, working_folder
from gpt.text.corpus.config import DataConfig, add_reading, as_options, is_url, read_with
from gpt.text.prepare.join import join_shards
from gpt.text.prepare.plan import READ, Plan, plan_apart, read_plan
from gpt.text.prepare.shard import CORES, encode_apart, record_of, records_of
from gpt.text.prepare.source import SHARD_BYTES
from gpt.text.prepared import SPLITS
from gpt.text.store import Store
from gpt.text.tokenizer import NAMES, TokenizerConfig

PROCESS_BYTES = 1 << 26  # of text, at least, for each process: one takes a second to begin


def prepare(
    text: str | Sequence[str],
    to: str | Path,
    *,
    executor: Executor | None = None,
    cache: str | Path = CACHE,
    cache_bytes: int = DataConfig.cache_bytes,
    **how: Any,
) -> None:
    """Prepare a text by `executor`, or else in this process: `plan` it with these settings, `encode` it, `join` it.

    What an earlier call has made is kept. Raises `UserError` naming the shards that failed, after all were tried.
    """
    plan(text, to, cache=cache, cache_bytes=cache_bytes, **how)
    encode_all(to, executor, cache=cache, cache_bytes=cache_bytes)
    join(to)


def plan(
    text: str | Sequence[str],
    to: str | Path,
    *,
    tokenizer: str = "gpt2",
    vocab_size: int = TokenizerConfig.vocab_size,
    shard_bytes: int = SHARD_BYTES,
    cache: str | Path = CACHE,
    **reading: Any,
) -> int:
    """Decide about a text and put the plan into a folder, here or behind a URL; return the number of shards.

    `text` is what `data.path` takes, and `reading` are keys of `data` that say how to read it. A shard is of about
    `shard_bytes` of files.
    """
    data = DataConfig("text", [text] if isinstance(text, str) else list(map(str, text)), **reading)
    how = TokenizerConfig(tokenizer, vocab_size)
    return len(plan_apart(Store(to), data, how, shard_bytes, Path(cache), say).places)


def encode(
    to: str | Path,
    number: int,
    cache: str | Path = CACHE,
    cache_bytes: int = DataConfig.cache_bytes,
    threads: int = 1,
) -> int:
    """Make a shard of a planned text, unless it is there; return its bytes of text.

    The cache holds unfinished work and copies of remote files, which may take `cache_bytes`.
    """
    store, cache = Store(to), Path(cache)
    plan = _plan_of(store)
    with working_folder(cache / f"shard-{plan.digest[:16]}-{number:06}", say) as scratch:
        record = record_of(store, plan, number)
        if record is None:  # nobody else has made it, also while this one waited
            record = encode_apart(plan, number, cache, cache_bytes, store, scratch, threads)
    return sum(record["splits"][name]["bytes"] for name in SPLITS)


def join(to: str | Path) -> None:
    """Publish a text of which all shards are made; `UserError` names those that are not."""
    store = Store(to)
    join_shards(store, _plan_of(store), say)


def encode_all(
    to: str | Path,
    executor: Executor | None = None,
    part: tuple[int, int] = (1, 1),
    cache: str | Path = CACHE,
    cache_bytes: int = DataConfig.cache_bytes,
) -> None:
    """Make the shards of a part, such as the third of 64, that are not there yet."""
    place = str(to) if is_url(str(to)) else str(home_path(to).absolute())  # a worker may stand elsewhere
    store = Store(place)
    plan = _plan_of(store)
    wanted = [number for number, record in enumerate(records_of(store, plan)) if record is None]
    wanted = [number for number in wanted if number % part[1] == part[0] - 1]
    arguments = (str(Path(cache).absolute()), cache_bytes)
    failed: dict[int, str] = {}
    calls: Iterator[tuple[int, Callable[[], int]]]
    if executor is None:
        calls = ((number, partial(encode, place, number, *arguments, CORES)) for number in wanted)
    else:
        try:
            futures = {executor.submit(encode, place, number, *arguments): number for number in wanted}
        except BrokenExecutor as error:
            raise UserError(f"{store.url}: nothing was encoded ({error}): give another executor") from None
        calls = ((futures[future], future.result) for future in as_completed(futures))
    with progress_bar(f"encoding {len(wanted)} shards", plan.bytes * len(wanted) // len(plan.places), delay=1) as bar:
        for number, call in calls:
            try:
                bar.update(call())
            except (UserError, OSError, MemoryError, BrokenExecutor) as error:  # all else is a bug
                failed[number] = reason(error)
    if failed:
        first = "; ".join(f"shard {number}: {why}" for number, why in sorted(failed.items())[:3])
        what = f"{len(failed):,} of {len(wanted):,} shards failed ({first}{'; ...' * (len(failed) > 3)})"
        raise UserError(f"{store.url}: {what}: mend that and run the command again, which keeps the others")


def _plan_of(store: Store) -> Plan:
    """Return the plan in a store, or raise `UserError`."""
    if plan := read_plan(store):
        return plan
    raise UserError(f"{store.url}: holds no plan: begin with python -m gpt.prepare --plan --text TEXT")


@contextlib.contextmanager
def processes(plan: Plan) -> Iterator[Executor | None]:
    """Give processes on all cores, which end with this one however it ends; none for a text that is too small."""
    count = min(CORES, len(plan.places), (plan.bytes or READ) // PROCESS_BYTES)
    if count < 2:
        yield None
        return
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), initializer=_end_with_parent)
    try:
        yield pool
    finally:
        for child in multiprocessing.active_children():
            child.kill()
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """Have this process end silently when its parent ends, and on Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        signal.raise_signal(signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def main(arguments: list[str] | None = None) -> None:
    """Plan, encode some shards, publish them all, or do the three after each other."""
    args = parse_arguments(arguments)
    whole = not (args.plan or args.part or args.join)
    if whole or args.plan:
        if not args.text:
            raise UserError("a plan needs a text: give --text FILE, a folder, a quoted glob or a URL of these")
        how = TokenizerConfig(args.tokenizer, args.vocab_size)
        plan_apart(Store(args.to), read_with(args), how, args.shard_bytes, args.cache, say)
    elif args.text:
        raise UserError(f"--text={args.text[0]}: the plan says which text: leave this out")
    if whole or args.part:
        with processes(_plan_of(Store(args.to))) as executor:
            encode_all(args.to, executor, args.part or (1, 1), args.cache, args.cache_bytes)
    if whole or args.join:
        join(args.to)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser("python -m gpt.prepare", "Prepare a text in parts, on many machines, for train.py data=prepared.")
    add = parser.add_argument
    add("--to", metavar="URL", required=True, help="where the prepared text goes: a folder, here or in a store")
    step = parser.add_mutually_exclusive_group()
    step.add_argument("--plan", action="store_true", help="first, once: decide the split, the tokenizer, the shards")
    step.add_argument("--part", metavar="I/N", type=_part, help="then, anywhere, in any order: encode a share of them")
    step.add_argument("--join", action="store_true", help="last, once: check that all are there, and publish")
    add("--text", metavar="TEXT", nargs="+", help="what data.path takes: files, folders, quoted globs, URLs of these")
    add_reading(parser)
    add("--tokenizer", choices=NAMES, default="gpt2", help="(default: gpt2)")
    add("--vocab-size", metavar="N", type=int, default=TokenizerConfig.vocab_size, help="of bpe")
    add("--shard-bytes", metavar="N", type=int, default=SHARD_BYTES, help="of files in a shard (default: 2^28)")
    add("--cache", metavar="DIR", type=home_path, default=CACHE, help="for work in progress and copies of remote files")
    add("--cache-bytes", metavar="N", type=int, default=DataConfig.cache_bytes, help="that these copies may take")
    return parser.parse_args(arguments)


def _part(text: str) -> tuple[int, int]:
    """Read 3/64."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not such as 3/64")
    return int(found[1]), int(found[2])


if __name__ == "__main__":
    with command_line("gpt.prepare", told=as_options):
        main()
