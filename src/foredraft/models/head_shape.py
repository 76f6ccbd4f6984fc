"""The shape that a head's config.json gives it, and what in its tensors is not of that shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from foredraft.errors import CheckpointError
from foredraft.models.formats.files import HeadFiles, TargetFacts, default_layers
from foredraft.models.heads import EagleConfig, EagleLayer, MedusaHeads

# Fields of EagleConfig and what config.json calls them.
SIZES = {
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
_EPS = 1e-6  # what transformers takes for a Llama layer that does not say


def head_module(files: HeadFiles, target: TargetFacts | None) -> EagleLayer | MedusaHeads:
    """Return the module that config and target describe, its weights not set; none are made on device "meta".
    Raises CheckpointError if the config does not say enough, or contradicts itself.
    """
    tensors = files.tensors
    if files.kind == "medusa":
        count, layers = files.config["medusa_num_heads"], files.config["medusa_num_layers"]
        own = next((name for head in range(count) if (name := f"{head}.{layers}.weight") in tensors), None)
        widths = [len(tensor) for name, tensor in tensors.items() if ".linear." in name]
        width = target.hidden_size if target else widths[0]
        vocab = len(tensors["token_map"]) if "token_map" in tensors else target and target.vocab_size
        return MedusaHeads(width, count, layers, own_vocab=(vocab or len(tensors[own])) if own else None)
    return EagleLayer(_eagle_config(files, target), own_lm_head="lm_head.weight" in tensors)


def weights_of(module: EagleLayer | MedusaHeads) -> nn.Module:
    """Return the part of a head whose parameters bear the names of the files."""
    return module.heads if isinstance(module, MedusaHeads) else module


def misfit(module: EagleLayer | MedusaHeads, tensors: Mapping[str, Tensor]) -> str | None:
    """Return what keeps the tensors of a file from being this module's weights, None if they are."""
    wanted = {name: list(value.shape) for name, value in weights_of(module).named_parameters()}
    other = {"token_map"}
    if isinstance(module, EagleLayer):
        other = {"embed_tokens.weight"} | (set() if module.config.eagle1 else {"d2t", "t2d"})
    if missing := wanted.keys() - tensors.keys():
        return f"{min(missing)} is missing: it is another kind of head, or damaged"
    if extra := tensors.keys() - wanted.keys() - other:
        return f"{min(extra)} is there, which is not known: it is another kind of head, or damaged"
    for name, shape in wanted.items():
        if (found := list(tensors[name].shape)) != shape:
            cause = "config.json is another head's"
            if isinstance(module, MedusaHeads):  # whose shape is the target's
                cause = "the head is for a target of another hidden size or vocabulary"
            return f"{name} is {found}, expected {shape}: {cause}"
        if not tensors[name].is_floating_point():
            return f"{name} is {tensors[name].dtype}: quantised heads are not read, give it in bfloat16"
    return None


def draft_vocab(files: HeadFiles) -> int | None:
    """Return from how many tokens an EAGLE-3 head drafts; None if nothing says so."""
    said: int | None = files.config.get("draft_vocab_size")
    sizes = (len(files.tensors[name]) for name in ("d2t", "lm_head.weight") if name in files.tensors)
    return next(sizes, None) if said is None else said


def _eagle_config(files: HeadFiles, target: TargetFacts | None) -> EagleConfig:
    config, tensors = files.config, files.tensors
    values: dict[str, Any] = {own: config[name] for own, name in SIZES.items() if config.get(name)}
    if theta := (config.get("rope_parameters") or {}).get("rope_theta"):  # as transformers 5 writes it
        values["rope_theta"] = theta
    if target is not None:
        values["vocab_size"] = target.vocab_size
    values["draft_vocab_size"] = draft_vocab(files) or values.get("vocab_size", 1)
    values.setdefault("vocab_size", values["draft_vocab_size"])
    for own in ("hidden_size", "intermediate_size", "heads"):
        if own not in values:
            raise CheckpointError(f"config.json lacks {SIZES[own]}: it is not this head's, or was cut short")
    heads = values["heads"]
    kv_heads = values.setdefault("kv_heads", heads)
    dim = values.setdefault("head_dim", values["hidden_size"] // heads)
    if heads % kv_heads or dim % 2 or not dim:
        raise CheckpointError(
            f"{heads} heads, {kv_heads} key heads, head_dim {dim}: key heads must divide heads, and head_dim "
            "must be even; config.json is another head's"
        )
    values.setdefault("norm_eps", _EPS)
    values["norm_before_residual"] = bool(config.get("norm_before_residual"))
    depth = target.num_layers if target else 0  # without a target only the number of states counts
    layers = files.hidden_layers or default_layers(depth)
    if files.kind == "eagle1":  # it reads the last hidden state and drafts from all tokens
        layers, values["draft_vocab_size"] = (depth,), values["vocab_size"]
        values |= {"eagle1": True, "fc_bias": "fc.bias" in tensors}
    return EagleConfig(**values, hidden_layers=layers)
