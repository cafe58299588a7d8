"""From the shards of a text to what can be opened: a manifest, and for a text of this machine one file a split."""

import hashlib
import json
from pathlib import Path

from gpt.errors import OutsideError, UserError
from gpt.files import replacing
from gpt.text.cache import delete
from gpt.text.corpus.corpus import Say
from gpt.text.prepare.plan import Plan, key_of
from gpt.text.prepare.shard import FILES, name_of, records_of
from gpt.text.prepared import SPLITS
from gpt.text.shards import GROUP
from gpt.text.store import Store


def join_here(folder: Path, plan: Plan, records: list[dict], key: dict, corpus: str) -> dict:
    """Write the token file of each split and the manifest, and then delete the shards; return the manifest's counts."""
    splits = counts_of(records)
    for name in SPLITS:
        files = [file for record in records for file in record["files"][name]]
        splits[name]["sha256"] = _concatenate(folder, files, folder / f"{name}.bin")
    _write_manifest(Store(folder), plan, key, corpus, splits)
    return splits


def tidy(folder: Path) -> None:
    """Delete what a finished text does not need."""
    kept = {"manifest.json", "tokenizer.json", *(f"{name}.bin" for name in SPLITS)}
    for file in folder.iterdir():
        if file.name not in kept:
            delete(file) if file.is_dir() else file.unlink()


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


def _concatenate(folder: Path, files: list, target: Path) -> str:
    """Make one file of several and return its hash; `UserError` if one of them is damaged."""
    whole = hashlib.sha256()
    with replacing(target) as temporary, temporary.open("wb") as stream:
        for name, _, sha256 in files:
            own = hashlib.sha256()
            with (folder / name).open("rb") as part:
                while block := part.read(1 << 22):
                    own.update(block)
                    whole.update(block)
                    stream.write(block)
            if own.hexdigest() != sha256:
                raise UserError(f"{folder / name}: was damaged while it was prepared: run the command again")
    return whole.hexdigest()


def _content(store: Store, number: int, file: list) -> bytes:
    """Return the validation tokens of a shard; if they are not what its record says, delete the record and say so."""
    name, _, sha256 = file
    content = store.read(name) or b""
    if hashlib.sha256(content).hexdigest() != sha256:
        store.delete(name_of(number))
        what = "is damaged (its SHA-256 is not that of its record)"
        raise OutsideError(f"{store.url}/{name}: {what}: run --part 1/1, which makes its shard again, and then --join")
    return content
