"""From a directory to a target: what is refused, in which precision it runs, and on which path."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from foredraft.errors import CheckpointError, ConfigError, ModelError
from foredraft.models import kernels, outline
from foredraft.models.bucketed import bucket, can_bucket
from foredraft.models.compiled import CompiledCausal, can_compile, compile_layers
from foredraft.models.fused import KINDS, can_fuse, fuse
from foredraft.models.hf_causal import IMPLEMENTATION, HFCausal, attention
from foredraft.models.packed import can_pack, is_slow, pack_linears
from foredraft.models.trial import agree_by_row, own_trial, trial

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DRAFT_VOCABULARY = "draft_vocabulary.safetensors"  # beside a model that drafts from some tokens only
_log = logging.getLogger(__name__)


def load_target(path: Path, *, dtype: str = "auto", device: str = "auto", fused: bool = True) -> HFCausal:
    """Load a directory of safetensors. Raises ModelError if the model cannot be run exactly, ConfigError on
    options.

    Known architectures run on the fused path, and on a GPU decode in buckets that are recorded as CUDA
    graphs, if that agrees with transformers' own modules; `fused` False keeps to those. That compiled layers
    agree is kept, and those modules are not run again.
    """
    where, ids = _device(device), _token_ids(path)
    known = outline.known(path, dtype) if fused and where.type == "cpu" else None
    if known is not None:
        return CompiledCausal(known, path, ids)
    import transformers

    transformers.AttentionInterface.register(IMPLEMENTATION, attention)
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # whatever its checks of a config raise
        raise ModelError(f"{path}: no model that transformers knows: {_first_line(error)}") from error
    _refuse(config, path)
    kept = _dtype(dtype, config, where, fused)
    needs_kernels = dtype == "auto" and is_slow(kept, where)  # else it would be float32
    there = None if ids is None else ids.to(where)
    target = HFCausal(_load(path, config, kept, where, ids), str(path), there)
    if needs_kernels and not can_compile(target):
        return load_target(path, dtype="float32", device=device)
    ways = ((can_compile, compile_layers), (can_fuse, fuse), (can_bucket, bucket))
    make = next((make for can, make in ways if can(target)), None)
    if fused and make is not None:
        fast = make(target)
        if isinstance(fast, CompiledCausal):
            fast.outline.keep(path, dtype)
        if fast is not None:
            return fast
        _log.warning("%s: the fused path disagrees with transformers' modules, so those are used", path)
        if needs_kernels:
            return load_target(path, dtype="float32", device=device)
        target = HFCausal(_load(path, config, kept, where, ids), str(path), there)
    if not agree_by_row(trial(target), own_trial(target), target.dtype):
        raise ModelError(
            f"{path}: {type(target.model).__name__} gives other logits here than by its own forward, so it "
            "cannot be run exactly: use another model"
        )
    if can_pack(target.dtype, where):
        pack_linears(target.model)
    return target


def _load(path: Path, config: Any, dtype: torch.dtype, where: torch.device, ids: Tensor | None) -> Any:
    import transformers

    try:
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=IMPLEMENTATION,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # libraries for quantised weights that are not there, attention of its own, …
        raise ModelError(f"{path}: cannot be loaded: {_first_line(error)}") from error
    if missing := sorted(found["missing_keys"]):
        raise CheckpointError(
            f"{path}: {len(missing)} tensors are missing, first {missing[0]}: fetch the model again"
        )
    if ids is not None:
        model.lm_head = _rows(model.get_output_embeddings(), ids)
    return model.eval().to(where)


def _token_ids(path: Path) -> Tensor | None:
    """Return the tokens that a distilled draft is narrowed to, int64, or None."""
    file = path / DRAFT_VOCABULARY
    return load_file(file)["token_ids"] if file.exists() else None


def _rows(full: nn.Linear, ids: Tensor) -> nn.Linear:
    """Return the part of a projection that makes the logits of some tokens."""
    narrow = nn.Linear(full.in_features, len(ids), bias=full.bias is not None, dtype=full.weight.dtype)
    narrow.weight = nn.Parameter(full.weight.detach()[ids])
    if full.bias is not None:
        narrow.bias = nn.Parameter(full.bias.detach()[ids])
    return narrow


def _refuse(config: Any, path: Path) -> None:
    """Refuse what is known from the config alone; the probe finds the rest."""
    if config.is_encoder_decoder:
        raise ModelError(
            f"{path}: {config.model_type} is an encoder-decoder model: only decoder-only models run"
        )
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise ModelError(
            f"{path}: {config.model_type} has layers of type {', '.join(sorted(kinds))}, whose state cannot "
            "be rolled back: use a model with full or sliding attention only"
        )
    if getattr(text, "use_bidirectional_attention", None):
        raise ModelError(f"{path}: {config.model_type} attends to later tokens: only causal models run")


def _dtype(name: str, config: Any, device: torch.device, fused: bool) -> torch.dtype:
    if name == "auto":
        stored = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
        kept = stored if isinstance(stored, torch.dtype) else _DTYPES.get(str(stored), torch.float32)
        if device.type == "cpu" and kept == torch.float16:
            kept = torch.bfloat16
        has_kernels = fused and kernels.IS_QUICK and config.model_type in KINDS
        slow = is_slow(kept, device) and not has_kernels
        return torch.float32 if slow or kept not in _DTYPES.values() else kept
    if name not in _DTYPES:
        raise ConfigError(f"dtype={name!r} is unknown: use auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r} is unknown: use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device={name!r} is not there: {torch.cuda.device_count()} CUDA devices; use device='cpu'"
        )
    return device


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
