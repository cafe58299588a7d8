"""From the shards of a text to what can be opened: a manifest."""

import hashlib
import json
from pathlib import Path

from gpt.errors import OutsideError, UserError
from gpt.text.corpus.corpus import Say
from gpt.text.prepare.plan import Plan, key_of
from gpt.text.prepare.shard import FILES, name_of, records_of
from gpt.text.prepared import SPLITS
from gpt.text.shards import GROUP
from gpt.text.store import Store


def join_shards(store: Store, plan: Plan, say: Say) -> None:
    """Publish the manifest, after checking that the store has every shard; `UserError` names those it lacks."""
    records = records_of(store, plan)
    if missing := [number for number, record in enumerate(records) if record is None]:
        some = ", ".join(map(str, missing[:5])) + ", ..." * (len(missing) > 5)
        raise UserError(
            f"{store.url}: lacks {len(missing):,} of {len(records):,} shards ({some}): run the missing parts again, or "
            "--part 1/1 for all that is missing"
        )
    found = [record for record in records if record]
    splits: dict[str, dict] = {
        name: {kind: sum(record["splits"][name][kind] for record in found) for kind in ("tokens", "bytes", "documents")}
        for name in SPLITS
    }
    hashes = dict(plan.text["hashes"])
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
    manifest = {"key": key, "corpus": corpus.name, "tokenizer": plan.tokenizer.sha256, "splits": splits}
    store.write_json("manifest.json", manifest | {"shards": train})
    tokens = splits["train"]["tokens"]
    say(f"published {tokens:,} tokens in {len(found):,} shards: data=prepared data.path={store.url}")


def _content(store: Store, number: int, file: list) -> bytes:
    """Return the validation tokens of a shard; if they are not what its record says, delete the record and say so."""
    name, _, sha256 = file
    content = store.read(name) or b""
    if hashlib.sha256(content).hexdigest() != sha256:
        store.delete(name_of(number))
        what = "is damaged (its SHA-256 is not that of its record)"
        raise OutsideError(f"{store.url}/{name}: {what}: run --part 1/1, which makes its shard again, and then --join")
    return content
