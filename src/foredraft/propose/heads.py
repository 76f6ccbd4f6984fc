"""From a head's directory to a draft that fits its target, and back."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.engine.protocols import Proposer
from foredraft.models.checkpoint import HeadFiles, TargetFacts, check_fits, read_head, write_head
from foredraft.models.formats.files import norms, target_rows
from foredraft.models.head_shape import SIZES, head_module, weights_of
from foredraft.models.heads import EagleLayer, MedusaHeads
from foredraft.propose.eagle import EagleProposer
from foredraft.propose.medusa import MedusaProposer


@dataclass(frozen=True, slots=True)
class EagleDraft:
    """An EAGLE head with what it takes from its target: the embedding [vocab, hidden] and the rows of the
    projection [draft vocab, hidden].
    """

    head: EagleLayer
    embedding: Tensor
    lm_head: Tensor

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one position takes in the head's cache."""
        config = self.head.config
        return 2 * config.kv_heads * config.head_dim * self.embedding.dtype.itemsize

    def proposer(self, kv_tokens: int) -> Proposer:
        """Return what drafts with it."""
        return EagleProposer(self.head, embedding=self.embedding, lm_head=self.lm_head, kv_tokens=kv_tokens)


@dataclass(frozen=True, slots=True)
class MedusaDraft:
    """Medusa heads, the target's projection to the tokens target_ids unless they have their own, and the
    calibrated tree, if any.
    """

    heads: MedusaHeads
    last_layer: int
    lm_head: Tensor | None
    target_ids: Tensor
    tree: tuple[tuple[int, ...], ...] | None
    kv_bytes_per_token: int = 0

    def proposer(self, kv_tokens: int) -> Proposer:
        """Return what drafts with them."""
        return MedusaProposer(
            self.heads,
            last_layer=self.last_layer,
            lm_head=self.lm_head,
            target_ids=self.target_ids,
            tree=self.tree,
        )


def load_head(
    path: Path, facts: TargetFacts, dtype: torch.dtype, device: torch.device
) -> EagleDraft | MedusaDraft:
    """Load a head of either kind for a target, where that is. Raises CheckpointError if it is damaged or does
    not fit.
    """
    files = read_head(path)
    if files.kind != "medusa":
        head = load_eagle(files, facts, dtype)
        rows = target_rows(facts, "lm_head", head.target_ids).to(dtype)
        own = files.tensors.get("embed_tokens.weight")
        embedding = target_rows(facts, "embed", None) if own is None else own
        return EagleDraft(head.to(device), embedding.to(device, dtype), rows.to(device))
    heads, ids = load_medusa(files, facts, dtype), token_ids(files, facts)
    tree = files.own.get("tree")
    return MedusaDraft(
        heads.to(device),
        facts.num_layers,
        None if heads.own else target_rows(facts, "lm_head", ids).to(device, dtype),
        ids.to(device),
        tuple(tuple(path) for path in tree) if tree else None,
    )


def load_eagle(files: HeadFiles, facts: TargetFacts, dtype: torch.dtype) -> EagleLayer:
    """Return the EAGLE head of a directory; raises CheckpointError if it does not fit the target."""
    check_fits(files, facts)
    head, tensors = head_module(files, facts), files.tensors
    assert isinstance(head, EagleLayer)
    _fill(head, tensors)
    if "d2t" in tensors:
        head.d2t.copy_(tensors["d2t"])
        head.t2d.zero_()
        head.t2d[head.target_ids] = True
    return head.to(dtype).eval()


def save_eagle(path: Path, head: EagleLayer, facts: TargetFacts, *, max_len: int) -> None:
    """Write an EAGLE head, bfloat16; a projection that is the target's own is left out."""
    shape = asdict(head.config)
    config: dict[str, Any] = {name: shape[own] for own, name in SIZES.items()}
    config["norm_before_residual"] = head.config.norm_before_residual
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        # What a Llama layer is without being told, but not to every reader.
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": max_len,
        "foredraft": {
            "kind": "eagle",
            "hidden_layers": list(head.config.hidden_layers),
            "target": target_record(facts),
            "version": 1,
        },
    }
    write_head(path, HeadFiles("eagle", config, _tensors(head), path, "eagle3"))


def load_medusa(files: HeadFiles, facts: TargetFacts, dtype: torch.dtype) -> MedusaHeads:
    """Return the Medusa heads of a directory; raises CheckpointError if they do not fit the target."""
    check_fits(files, facts)
    heads = head_module(files, facts)
    assert isinstance(heads, MedusaHeads)
    _fill(heads, files.tensors)
    return heads.to(dtype).eval()


def token_ids(files: HeadFiles, facts: TargetFacts) -> Tensor:
    """Return the tokens of the target that Medusa heads draft from, int64 [draft vocab]."""
    return files.tensors.get("token_map", torch.arange(facts.vocab_size))


def save_medusa(
    path: Path,
    heads: MedusaHeads,
    token_ids: Tensor,
    tree: Sequence[Sequence[int]],
    facts: TargetFacts,
) -> None:
    """Write Medusa heads, bfloat16, the tokens they draft from and their calibrated tree."""
    config = {
        "medusa_num_heads": len(heads.heads),
        "medusa_num_layers": heads.layers,
        "base_model_name_or_path": facts.name,
        "foredraft": {
            "kind": "medusa",
            "target": target_record(facts),
            "tree": [list(path) for path in tree],
        },
    }
    write_head(
        path, HeadFiles("medusa", config, _tensors(heads.heads) | {"token_map": token_ids}, path, "medusa")
    )


def fingerprint(facts: TargetFacts) -> str:
    """Return what tells a target from others of its shape: a hash of its norms' weights, which quantising
    leaves as they are.
    """
    digest = hashlib.sha256()
    for name, weight in norms(facts):
        digest.update(name.encode() + weight.float().numpy().tobytes())
    return digest.hexdigest()[:16]


def target_record(facts: TargetFacts) -> dict[str, Any]:
    """Return what a draft notes of the target it was made for."""
    return {
        "hidden_size": facts.hidden_size,
        "vocab_size": facts.vocab_size,
        "num_layers": facts.num_layers,
        "name": facts.name,
        "fingerprint": fingerprint(facts),
    }


def _tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    return {
        name: value.detach().to(torch.bfloat16 if value.is_floating_point() else value.dtype).contiguous()
        for name, value in module.state_dict().items()
    }


def _fill(head: EagleLayer | MedusaHeads, tensors: dict[str, Tensor]) -> None:
    """Set the weights, which check_fits has found to fit."""
    module = weights_of(head)
    module.load_state_dict(
        {name: tensors[name].float() for name, _ in module.named_parameters()}, strict=False
    )
