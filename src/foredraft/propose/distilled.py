"""A distilled draft on disk lacks what it shares with its target: vocabulary matrices and tokenizer."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from foredraft.errors import CheckpointError
from foredraft.models.checkpoint import TargetFacts
from foredraft.models.formats.files import read_json, target_tensor, write_tensors
from foredraft.models.load import DRAFT_VOCABULARY
from foredraft.propose.heads import target_record
from foredraft.zoo import cache_dir

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_SHARED = ("model.embed_tokens.weight", "lm_head.weight")


def is_distilled(path: Path) -> bool:
    """True for a directory that save_distilled wrote."""
    config = path / "config.json"
    return config.is_file() and (read_json(config).get("foredraft") or {}).get("kind") == "draft"


def save_distilled(
    path: Path, config: dict[str, Any], state: dict[str, Tensor], ids: Tensor, facts: TargetFacts
) -> None:
    """Write a model that has its target's vocabulary matrices, without them. ids: int64, the tokens from
    which it drafts.
    """
    path.mkdir(parents=True, exist_ok=True)
    said = {name: value for name, value in config.items() if name != "_name_or_path"}  # this machine's
    said["foredraft"] = {"kind": "draft", "target": target_record(facts)}
    (path / "config.json").write_text(json.dumps(said, indent=2), encoding="utf-8")
    kept = {name: value.contiguous() for name, value in state.items() if name not in _SHARED}
    write_tensors(path / "model.safetensors", kept)
    write_tensors(path / DRAFT_VOCABULARY, {"token_ids": ids})


def complete(path: Path, facts: TargetFacts) -> Path:
    """Return a directory, in the cache, of the whole model; raises CheckpointError if it is for another
    target.
    """
    wanted, found = read_json(path / "config.json")["foredraft"]["target"], target_record(facts)
    differing = [name for name in wanted if name != "name" and wanted[name] != found.get(name)]
    if differing:
        raise CheckpointError(
            f"{path} was distilled from {wanted['name']} and not from this target: {differing[0]} is "
            f"{wanted[differing[0]]} there and {found.get(differing[0])} here"
        )
    digest = hashlib.sha256((path / "model.safetensors").read_bytes())
    digest.update((path / DRAFT_VOCABULARY).read_bytes())
    home = cache_dir() / "drafts" / f"{digest.hexdigest()[:16]}-{found['fingerprint']}"
    if not home.exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=home.parent))
        _write(path, facts, work)
        try:
            os.rename(work, home)
        except OSError:  # another process was first
            shutil.rmtree(work)
    return home


def _write(path: Path, facts: TargetFacts, work: Path) -> None:
    assert facts.path is not None
    state = load_file(path / "model.safetensors")
    tied = read_json(path / "config.json").get("tie_word_embeddings", False)
    for name in _SHARED[:1] if tied else _SHARED:
        state[name] = target_tensor(facts, name)
    write_tensors(work / "model.safetensors", state)
    for file in ("config.json", DRAFT_VOCABULARY):
        shutil.copyfile(path / file, work / file)
    for file in _TOKENIZER:
        if (facts.path / file).exists():
            shutil.copyfile(facts.path / file, work / file)
