"""From a head's directory to a module that fits its target, and back."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import CheckpointError
from foredraft.models.checkpoint import HeadFiles, TargetFacts, check_fits, read_head, write_head
from foredraft.models.formats.files import default_layers, target_rows
from foredraft.models.heads import EagleConfig, EagleLayer, MedusaHeads

_SIZES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "draft_vocab_size": "draft_vocab_size",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
}


def load_eagle(files: HeadFiles, facts: TargetFacts, dtype: torch.dtype) -> EagleLayer:
    """Return the EAGLE head of a directory; raises CheckpointError if it does not fit the target."""
    check_fits(files, facts)
    config, tensors = files.config, files.tensors
    values: dict[str, Any] = {own: config[name] for own, name in _SIZES.items() if config.get(name)}
    values.setdefault("kv_heads", values["heads"])
    values.setdefault("head_dim", values["hidden_size"] // values["heads"])
    values.setdefault("draft_vocab_size", facts.vocab_size)
    layers = files.hidden_layers or default_layers(facts.num_layers)
    head = EagleLayer(EagleConfig(**values, hidden_layers=layers), own_lm_head="lm_head.weight" in tensors)
    _fill(head, tensors, files.path, {"embed_tokens.weight", "d2t", "t2d"})
    if "d2t" in tensors:
        head.d2t.copy_(tensors["d2t"])
        head.t2d.zero_()
        head.t2d[head.target_ids] = True
    return head.to(dtype).eval()


def save_eagle(path: Path, head: EagleLayer, facts: TargetFacts, provenance: dict[str, Any]) -> None:
    """Write an EAGLE head, bfloat16; a projection that is the target's own is left out."""
    shape = asdict(head.config)
    config: dict[str, Any] = {name: shape[own] for own, name in _SIZES.items()}
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "max_position_embeddings": provenance.get("max_len", 2048),
        "foredraft": {
            "kind": "eagle",
            "hidden_layers": list(head.config.hidden_layers),
            "target": _target(facts),
            "version": 1,
            "provenance": provenance,
        },
    }
    write_head(path, HeadFiles("eagle", config, _tensors(head), path, "eagle3"))


def load_medusa(files: HeadFiles, facts: TargetFacts, dtype: torch.dtype) -> MedusaHeads:
    """Return the Medusa heads of a directory; raises CheckpointError if they do not fit the target."""
    check_fits(files, facts)
    own = [name for name in files.tensors if name.count(".") == 2]
    if own:
        raise CheckpointError(
            f"{files.path} has projections of its own ({own[0]}): heads that share the target's are supported"
        )
    count, layers = files.config["medusa_num_heads"], files.config.get("medusa_num_layers", 1)
    heads = MedusaHeads(facts.hidden_size, count, layers)
    _fill(heads.heads, files.tensors, files.path, set())
    return heads.to(dtype).eval()


def save_medusa(
    path: Path, heads: MedusaHeads, facts: TargetFacts, provenance: dict[str, Any], **more: Any
) -> None:
    """Write Medusa heads, bfloat16. more: further entries of foredraft's own, as tree and vocabulary."""
    config = {
        "medusa_num_heads": len(heads.heads),
        "medusa_num_layers": len(heads.heads[0]),  # type: ignore[arg-type]
        "base_model_name_or_path": facts.name,
        "foredraft": {"kind": "medusa", "target": _target(facts), "provenance": provenance, **more},
    }
    write_head(path, HeadFiles("medusa", config, _tensors(heads.heads), path, "medusa"))


def vocabulary(facts: TargetFacts, name: str, rows: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return rows of the target's "embed" or "lm_head" matrix, [rows, hidden]."""
    found: Tensor = target_rows(facts, name, rows)  # type: ignore[arg-type]
    return found.to(dtype)


def read_for(path: Path, kind: str) -> HeadFiles:
    """Read a head that should be of one kind; raises CheckpointError."""
    files = read_head(path)
    if files.kind != kind:
        raise CheckpointError(f"{path} holds a head of kind {files.kind!r}, not {kind!r}")
    return files


def _target(facts: TargetFacts) -> dict[str, Any]:
    return {
        "hidden_size": facts.hidden_size,
        "vocab_size": facts.vocab_size,
        "num_layers": facts.num_layers,
        "name": facts.name,
    }


def _tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    return {
        name: value.detach().to(torch.bfloat16 if value.is_floating_point() else value.dtype).contiguous()
        for name, value in module.state_dict().items()
    }


def _fill(module: torch.nn.Module, tensors: dict[str, Tensor], path: Path, other: set[str]) -> None:
    wanted = {name for name, _ in module.named_parameters()}
    missing, extra = wanted - tensors.keys(), tensors.keys() - wanted - other
    if missing or extra:
        odd = f"lacks {min(missing)}" if missing else f"has {min(extra)}, which is not known"
        raise CheckpointError(f"{path} {odd}: it is another kind of head, or damaged")
    module.load_state_dict({name: tensors[name].float() for name in wanted}, strict=False)
