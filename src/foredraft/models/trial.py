"""Short runs by which two ways to run a model are compared at load."""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.engine.batch import Feed, make_batch
from foredraft.engine.pool import BlockTable
from foredraft.models.hf_causal import IMPLEMENTATION, HFCausal
from foredraft.types import Draft

_NOISE = {torch.float32: 1e-4}  # relative, of logits; 0.05 in half precision
_LENGTH = 12  # tokens of the text
_PARENTS = (-1, -1, 0, 1)  # of the tree behind it
_PATHS = ((), (0,), (1,), (0, 2), (1, 3))  # its nodes up to each row


def trial(target: HFCausal) -> Tensor:
    """Logits of a short text and a small tree behind it, float32."""
    kv, table = target.make_kv(_LENGTH + 8), BlockTable()
    kv.pool.grow(table, _LENGTH + 8)
    tokens = _tokens(target)
    tree = Draft(tokens=torch.tensor(tokens[_LENGTH:]), parents=_PARENTS)
    half = _LENGTH // 2
    target.forward(make_batch([Feed(tokens[:half], 0, table, None)]), kv)
    logits = target.forward(make_batch([Feed(tokens[half:_LENGTH], half, table, tree)]), kv).logits.float()
    return logits if target.token_ids is None else logits[:, target.token_ids]


@torch.inference_mode()
def own_trial(target: HFCausal) -> Tensor:
    """The same logits by the model's own forward, with its own attention, a path of the tree at a time."""
    tokens = _tokens(target)
    target.model.set_attn_implementation("eager")
    try:
        rows = []
        for path in _PATHS:
            ids = tokens[:_LENGTH] + [tokens[_LENGTH + node] for node in path]
            out = target.model(torch.tensor([ids], device=target.device), use_cache=False)
            rows.append(out.logits[0, -1].float())
        return torch.stack(rows)
    finally:
        target.model.set_attn_implementation(IMPLEMENTATION)


def agree(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    """True if the logits of two trial runs, float32, differ by no more than a precision's rounding."""
    return bool((found - wanted).norm() / wanted.norm() < _NOISE.get(dtype, 0.05))


def agree_by_row(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    """The same of most rows, by more in half precision, where rounding may choose another expert."""
    apart = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    return bool(apart.median() < _NOISE.get(dtype, 0.25))


def _tokens(target: HFCausal) -> list[int]:
    return (torch.arange(_LENGTH + len(_PARENTS)) * 7919 % target.vocab_size).tolist()
