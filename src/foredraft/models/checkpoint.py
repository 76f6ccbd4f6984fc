"""Draft heads on disk: read any known layout, write any of them, whole directories or none."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import CheckpointError
from foredraft.models.formats import eagle1, eagle3, medusa, speculators
from foredraft.models.formats.files import (
    HeadFiles,
    Kind,
    Layout,
    TargetFacts,
    check_types,
    read_json,
    read_tensors,
    target_facts,
    target_rows,
    write_tensors,
)
from foredraft.models.lint import Finding, check_fits, lint

__all__ = [
    "Finding",
    "HeadFiles",
    "TargetFacts",
    "check_fits",
    "exported",
    "is_head",
    "lint",
    "read_head",
    "target_facts",
    "write_head",
]

# Which layouts hold a kind of head.
LAYOUTS_OF: dict[Kind, tuple[Layout, ...]] = {
    "medusa": ("medusa",),
    "eagle": ("eagle3", "speculators"),
    "eagle1": ("eagle1",),
}
LAYOUTS = tuple(layout for layouts in LAYOUTS_OF.values() for layout in layouts)
_BORROWED = "borrowed"  # in the config: tensors that an export took from the target


def is_head(path: Path) -> bool:
    """True if a directory's config.json is that of a draft head, not of a model."""
    if not (path / "config.json").is_file():
        return False
    config = read_json(path / "config.json")
    architectures = config.get("architectures") or []
    return (
        (config.get("foredraft") or {}).get("kind") in LAYOUTS_OF
        or "medusa_num_heads" in config
        or "speculators_model_type" in config
        or "eagle_config" in config
        or any("eagle3" in str(name).lower() for name in architectures)
        or "draft_vocab_size" in config
        or eagle1.may_be_eagle1(config, path)
    )


def read_head(path: Path) -> HeadFiles:
    """Read a head of any known layout. Raises CheckpointError for pickled, damaged or unknown ones."""
    tensors, config = read_tensors(path), read_json(path / "config.json")
    check_types(config, path / "config.json")
    if "speculators_model_type" in config:
        return HeadFiles("eagle", *speculators.from_speculators(config, tensors), path, "speculators")
    if medusa.looks_like_medusa(config, tensors):
        return HeadFiles("medusa", *medusa.from_medusa(config, tensors), path, "medusa")
    if eagle1.looks_like_eagle1(tensors):
        return HeadFiles("eagle1", *eagle1.from_eagle1(config, tensors), path, "eagle1")
    if any(name.removeprefix("model.") == "fc.weight" for name in tensors):
        return HeadFiles("eagle", *eagle3.from_eagle3(config, tensors), path, "eagle3")
    raise CheckpointError(
        f"{path} is no draft head that is known here: it has neither Medusa's blocks nor EAGLE's fc.weight, "
        f"first tensor {min(tensors, default='none')}"
    )


def write_head(path: Path, files: HeadFiles, layout: Layout | None = None) -> None:
    """Write a head to a directory, in the layout it had unless told; what was at `path` is replaced at once.

    Tensors are written bit by bit as they are. Raises CheckpointError for a layout of another kind of head.
    """
    layout = layout or files.layout
    if layout not in LAYOUTS_OF[files.kind]:
        raise CheckpointError(
            f"{files.path} is of kind {files.kind}, which the {layout} layout does not hold: use "
            + " or ".join(LAYOUTS_OF[files.kind])
        )
    config, tensors, name = files.config, files.tensors, "model.safetensors"
    if layout == "medusa":
        name = medusa.FILE
    elif layout == "eagle3":
        config, tensors = eagle3.to_eagle3(config, tensors)
    elif layout == "eagle1":
        config, tensors = eagle1.to_eagle1(config, tensors)
    else:
        config, tensors = speculators.to_speculators(config, tensors)
    _write(path, config, tensors, name)


def exported(files: HeadFiles, layout: Layout, target: TargetFacts | None) -> tuple[HeadFiles, list[str]]:
    """Return a head made complete for other programs that read this layout, and what was done to it.

    d2t becomes offsets; what other programs do not take from the target is copied from it. Raises
    CheckpointError if that needs a target and none is given.
    """
    if files.kind != "eagle":
        return files, []
    tensors, done = dict(files.tensors), list[str]()
    own = dict(files.own)
    borrowed = set(own.pop(_BORROWED, ()))
    for name in borrowed & tensors.keys():
        del tensors[name]
    _offsets(files, tensors, done)
    dtype = tensors["fc.weight"].dtype
    wanted = {"lm_head.weight"} | ({"embed_tokens.weight"} if layout == "speculators" else set())
    for name in sorted(wanted - tensors.keys()):
        if target is None:
            raise CheckpointError(
                f"{files.path} has no {name}, which the {layout} layout needs: name the target it is to be "
                "taken from (--target)"
            )
        if name == "lm_head.weight":
            ids = tensors["d2t"] + torch.arange(len(tensors["d2t"])) if "d2t" in tensors else None
            rows = target_rows(target, "lm_head", ids)
        else:
            rows = target_rows(target, "embed", None)
        tensors[name] = rows.to(dtype).contiguous()
        own[_BORROWED] = [*own.get(_BORROWED, ()), name]
        done.append(f"{name} {list(rows.shape)} is taken from {target.name}")
    config = files.config | {"foredraft": own}
    if target is not None and not own.get("target"):
        own["target"] = {
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "num_layers": target.num_layers,
            "name": target.name,
        }
    return replace(files, config=config, tensors=tensors), done


def _offsets(files: HeadFiles, tensors: dict[str, Tensor], done: list[str]) -> None:
    """Make d2t hold offsets, and t2d exist, where there is a reduced vocabulary."""
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    vocab = len(t2d) if t2d is not None else files.config.get("vocab_size")
    if d2t is None or vocab is None or d2t.is_floating_point():
        return
    if eagle3.d2t_kind(d2t, t2d, vocab) == "absolute":
        tensors["d2t"] = d2t.long() - torch.arange(len(d2t))
        done.append("d2t held target ids; it is written as offsets")
    if t2d is None:
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool)
        tensors["t2d"][tensors["d2t"].long() + torch.arange(len(d2t))] = True
        done.append("t2d is made from d2t")


def _write(path: Path, config: dict[str, Any], tensors: dict[str, Tensor], name: str) -> None:
    """Write both files beside `path`, then put the directory in its place in one move."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as work:
        built = Path(work) / "new"
        built.mkdir()
        held = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        write_tensors(built / name, held)
        (built / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if path.exists():
            for other in path.iterdir():  # provenance and the like stay
                if other.name != "config.json" and other.suffix != ".safetensors":
                    move = shutil.copytree if other.is_dir() else shutil.copy2
                    move(other, built / other.name)
            os.replace(path, Path(work) / "old")
        os.replace(built, path)
