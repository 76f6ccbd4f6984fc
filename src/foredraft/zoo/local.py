"""Is this directory a model we can load? Asked before torch is loaded, answered with what is missing."""

from __future__ import annotations

import json
from pathlib import Path

from foredraft.errors import CheckpointError, ModelError

INDEX = "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_LFS = b"version https://git-lfs"


def check_dir(path: Path) -> Path:
    """Return the directory if it has config.json and whole safetensors files.

    Raises ModelError naming what is missing, CheckpointError naming a file that is cut short.
    """
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelError(_no_weights(path))
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} is no model directory: it has weights but no config.json")
    absent = [name for name in _shards(path) if not (path / name).exists()]
    if absent:
        raise CheckpointError(f"{path} lacks {len(absent)} of the files its {INDEX} names, first {absent[0]}")
    for file in files:
        _check_size(file)
    return path


def _no_weights(path: Path) -> str:
    """Say what the directory holds instead of safetensors."""
    if ggufs := sorted(path.glob("*.gguf")):
        return f"{path} holds GGUF files: name one of them, such as {ggufs[0]}"
    if pickled := [file.name for pattern in _PICKLED for file in sorted(path.glob(pattern))]:
        return (
            f"{path} holds pickled weights only ({pickled[0]}), which can run any code when they are loaded: "
            "convert them to safetensors, as transformers' save_pretrained writes them"
        )
    if (path / "config.json").is_file():
        return f"{path} has a config.json but no *.safetensors weights"
    return f"{path} is no model directory: it has neither config.json nor *.safetensors weights"


def _shards(path: Path) -> list[str]:
    """Return the files the index names; none if there is no index."""
    index = path / INDEX
    if not index.exists():
        return []
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is damaged: {error}") from error


def _check_size(file: Path) -> None:
    """Compare the file's size with what its header promises (8 bytes of length, JSON, then the data)."""
    found = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(max(8, len(_LFS)))
        if start.startswith(_LFS):
            raise CheckpointError(f"{file} is a Git LFS pointer, not the weights: run `git lfs pull`")
        size = int.from_bytes(start[:8], "little")
        opened.seek(8)
        try:
            head = json.loads(opened.read(size) if size < found else b"")
            ends = [entry["data_offsets"][1] for name, entry in head.items() if name != "__metadata__"]
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise CheckpointError(f"{file} is damaged: it has no safetensors header") from error
    needed = 8 + size + max(ends, default=0)
    if found != needed:
        raise CheckpointError(f"{file} is damaged: it has {found:,} bytes, its header says {needed:,}")
