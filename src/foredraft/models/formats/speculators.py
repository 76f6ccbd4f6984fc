"""EAGLE-3 heads in the `speculators` layout, which vLLM reads: its layer ids count inputs, so they are hidden
states as transformers numbers them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from foredraft.errors import CheckpointError
from foredraft.models.formats.eagle3 import IDS, LAYER, renamed

# Keys of their config that are not the decoder layer's. Kept under their names in ours.
_OUTER = (
    "draft_vocab_size",
    "norm_before_residual",
    "target_hidden_size",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "embed_requires_grad",
    "foredraft",
)


def from_speculators(
    config: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Take a directory's config and tensors to the names used here; raises CheckpointError by name for other
    kinds of drafts.
    """
    kind = config.get("speculators_model_type")
    if kind != "eagle3":
        raise CheckpointError(f"speculators_model_type is {kind!r}: only 'eagle3' is read")
    own = {"kind": "eagle"} | (config.get("foredraft") or {})
    ids = config.get(IDS)
    if ids is not None and "hidden_layers" not in own:
        own["hidden_layers"] = list(ids)
    inner = {"model_type": "llama"} | dict(config.get("transformer_layer_config") or {})
    kept = {key: config[key] for key in _OUTER if key in config}
    # What has no place in the other layout is carried along, so that writing this one again loses nothing.
    carried = {
        key: value for key, value in config.items() if key not in (*_OUTER, "transformer_layer_config", IDS)
    }
    own["speculators"] = carried
    return inner | kept | {"foredraft": own}, renamed(tensors, "layers.0.", LAYER)


def to_speculators(
    config: dict[str, Any], tensors: dict[str, Tensor], *, levels: int = 3
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what goes into the files. levels: how deep vLLM drafts unless it is told."""
    own = dict(config.get("foredraft", {}))
    carried = own.pop("speculators", {})
    target = own.get("target", {})
    proposal = {"proposal_type": "greedy", "speculative_tokens": levels}
    proposal |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
    outer: dict[str, Any] = {
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "architectures": ["Eagle3Speculator"],
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target.get("name"), "architectures": []},
        },
        # Absent means false to one reader and true to another.
        "norm_before_residual": bool(config.get("norm_before_residual", False)),
    } | carried
    outer |= {key: config[key] for key in _OUTER if key in config} | {"foredraft": own}
    if own.get("hidden_layers") is not None:
        outer[IDS] = list(own["hidden_layers"])
    ours = (*_OUTER, IDS, "eagle_config", "architectures")
    outer["transformer_layer_config"] = {key: value for key, value in config.items() if key not in ours}
    return outer, renamed(tensors, LAYER, "layers.0.")
