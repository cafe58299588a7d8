"""From the shards of a text to what can be opened: a manifest."""

import hashlib
import json
from pathlib import Path

from gpt.errors import OutsideError, UserError
from gpt.text.corpus.corpus import Say
from gpt.text.prepare.plan import Plan, key_of
from gpt.text.prepare.shard import FILES, name_of, records_of
from gpt.text.prepared import SPLITS, width
from gpt.text.shards import GROUP
from gpt.text.store import Store


def join_here(folder: Path, plan: Plan, records: list[dict], key: dict, corpus: str) -> None:
    """Write the manifest of a text whose shards stand one after the other; `UserError` if one of them is damaged."""
    splits = counts_of(records)
    for name in SPLITS:
        file, whole = folder / f"{name}.bin", hashlib.sha256()
        with file.open("rb") as stream:
            for record in records:
                shard, left = hashlib.sha256(), record["splits"][name]["tokens"] * width(plan.tokenizer).itemsize
                while block := stream.read(min(left, 1 << 22)):
                    shard.update(block)
                    whole.update(block)
                    left -= len(block)
                if shard.hexdigest() != record["splits"][name]["sha256"]:
                    raise UserError(f"{file}: was damaged while the text was prepared: run the command again")
        splits[name]["sha256"] = whole.hexdigest()
    _write_manifest(Store(folder), plan, key, corpus, splits)


def join_apart(store: Store, plan: Plan, say: Say) -> None:
    """Publish the manifest, after checking that the store has every shard; `UserError` names those it lacks."""
    records = records_of(store, plan)
    if missing := [number for number, record in enumerate(records) if record is None]:
        some = ", ".join(map(str, missing[:5])) + ", ..." * (len(missing) > 5)
        raise UserError(
            f"{store.url}: lacks {len(missing):,} of {len(records):,} shards ({some}): run the missing parts again, or "
            "--part 1/1 for all that is missing"
        )
    found = [record for record in records if record]
    splits, hashes = counts_of(found), dict(plan.text["hashes"])
    train = [file for record in found for file in record["files"]["train"]]
    listed = [(number, file) for number, record in enumerate(found) for file in record["files"]["validation"]]
    validation = b"".join(_content(store, number, file) for number, file in listed)
    splits["train"]["sha256"] = hashlib.sha256(json.dumps(train).encode()).hexdigest()
    splits["validation"]["sha256"] = hashlib.sha256(validation).hexdigest()
    for record in found:
        hashes |= record["hashes"]
    corpus = plan.corpus_at(Path(), 0, say)  # whose files nobody reads
    identity = corpus.identity(hashes[str(number)] for number in range(len(corpus.files)))
    key = key_of(identity, plan.text["tokenizer"], plan.text["data"]["validation_bytes"])
    if len(found) * FILES > GROUP:  # then the order of windows follows from the shards
        key["shards"] = splits["train"]["sha256"]
    store.write("validation.bin", validation)
    _write_manifest(store, plan, key, corpus.name, splits, shards=train)
    tokens = splits["train"]["tokens"]
    say(f"published {tokens:,} tokens in {len(found):,} shards: data=prepared data.path={store.url}")


def counts_of(records: list[dict]) -> dict:
    """Return the tokens, bytes and documents of each split."""
    kinds = ("tokens", "bytes", "documents")
    return {name: {kind: sum(record["splits"][name][kind] for record in records) for kind in kinds} for name in SPLITS}


def _write_manifest(store: Store, plan: Plan, key: dict, corpus: str, splits: dict, **more: list) -> None:
    manifest = {"key": key, "corpus": corpus, "tokenizer": plan.tokenizer.sha256, "splits": splits, **more}
    store.write_json("manifest.json", manifest)


def _content(store: Store, number: int, file: list) -> bytes:
    """Return the validation tokens of a shard; if they are not what its record says, delete the record and say so."""
    name, _, sha256 = file
    content = store.read(name) or b""
    if hashlib.sha256(content).hexdigest() != sha256:
        store.delete(name_of(number))
        what = "is damaged (its SHA-256 is not that of its record)"
        raise OutsideError(f"{store.url}/{name}: {what}: run --part 1/1, which makes its shard again, and then --join")
    return content
