"""Llama and its kin on a GPU: steps of few rows have a fixed shape and are replayed, all others run as they
come.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from foredraft.engine.batch import Batch, Feed, make_batch
from foredraft.engine.kv import KVCache
from foredraft.engine.pool import BlockTable
from foredraft.engine.protocols import ForwardOut
from foredraft.models.buckets import Bucket, Inputs, Outputs, Passes, Record
from foredraft.models.fused import KINDS, FusedCausal, has_fixed_angles
from foredraft.models.hf_causal import HFCausal
from foredraft.models.trial import agree
from foredraft.sampling import widen
from foredraft.types import Draft, chain

_TRIAL = 40  # tokens of the trial's text, more than any bucket's rows
_log = logging.getLogger(__name__)


class BucketedCausal(FusedCausal):
    """The fused layers on any device, decoding steps in buckets. Takes the weights out of `slow`.

    Whatever it returns is the caller's own: logits and hidden states are copied out of the recorded pass.
    """

    turns_keys = False

    def __init__(self, slow: HFCausal, record: Record | None = None) -> None:
        super().__init__(slow)
        like = torch.zeros(0, 0, dtype=self.dtype, device=self.device)
        self._passes = Passes(self._body, like, record)
        self._no_rows = torch.zeros(0, dtype=torch.int64, device=self.device)

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KVCache, hidden_layers: tuple[int, ...] = ()) -> ForwardOut:
        """See HFCausal.forward."""
        bucket = Bucket.of(batch)
        if bucket is None:
            return super().forward(batch, kv, hidden_layers)
        inputs, (*hidden, last) = self._passes.run(batch, bucket, kv, hidden_layers)
        real, wanted = inputs.real[: len(batch.token_ids)], inputs.wanted[: len(batch.logit_rows)]
        logits = self.to_logits(last[wanted])
        if self.token_ids is not None:
            logits = widen(logits, self.token_ids, self.vocab_size)
        return ForwardOut(logits, tuple(layer[real] for layer in hidden))

    def _body(self, inputs: Inputs, attend: Any, kind: Hashable) -> Outputs:
        """Return the hidden states asked for, then the last one, [seqs * rows, width] each: logits of all
        rows of all buckets would take gigabytes.
        """
        layers = cast(tuple[int, ...], kind)
        batch = Batch(inputs.tokens, inputs.positions, (), self._no_rows, ())
        return super()._run(batch, attend, (*layers, -1)).hidden

    def _run(self, batch: Batch, attend: Any, hidden_layers: tuple[int, ...]) -> ForwardOut:
        moved = replace(
            batch,
            token_ids=batch.token_ids.to(self.device),
            positions=batch.positions.to(self.device),
            logit_rows=batch.logit_rows.to(self.device),
        )
        return super()._run(moved, attend, hidden_layers)


def can_bucket(target: HFCausal) -> bool:
    """True on a GPU, for architectures known here whose steps never depend on their numbers."""
    return target.device.type == "cuda" and has_fixed_steps(target)


def has_fixed_steps(target: HFCausal) -> bool:
    """True for a known architecture without windows to cut or angles that change as texts grow."""
    config = target.model.config
    if KINDS.get(config.model_type) is not FusedCausal or config.hidden_act != "silu":
        return False
    windows = any(head.window is not None or head.softcap is not None for head in target.heads)
    return has_fixed_angles(target.model.model.rotary_emb) and not windows


def bucket(slow: HFCausal, record: Record | None = None) -> BucketedCausal | None:
    """Return the twin of a target that decodes in buckets, or None where the two disagree or it cannot run.
    Either way `slow` is used up.
    """
    wanted = _trial(slow)
    fast = BucketedCausal(slow, record)
    try:
        found = _trial(fast)
    except RuntimeError as failure:  # a driver that cannot record, or too little memory for it
        _log.warning("%s: a step in buckets failed: %s", slow.name, failure)
        return None
    return fast if agree(found, wanted, slow.dtype) else None


def _trial(target: HFCausal) -> Tensor:
    """Logits of two prompts of one text, then of a tree beside a chain, twice in one bucket; float32."""
    kv, tables = target.make_kv(4 * _TRIAL), [BlockTable(), BlockTable()]
    text = (torch.arange(_TRIAL + 8) * 7919 % target.vocab_size).tolist()
    drafts = [Draft(torch.tensor(text[_TRIAL + 4 :]), (-1, -1, 0, 1)), chain(text[_TRIAL : _TRIAL + 3])]
    feeds = []
    for table, length in zip(tables, (_TRIAL, _TRIAL - 3), strict=True):
        kv.pool.grow(table, _TRIAL + 4)
        feeds.append(Feed(text[: length - 2], 0, table, None))
    target.forward(make_batch(feeds), kv)
    found = []
    for back in (2, 1):
        steps = [
            Feed(text[length - back : length - back + 1], length - back, table, draft)
            for table, length, draft in zip(tables, (_TRIAL, _TRIAL - 3), drafts, strict=True)
        ]
        found.append(target.forward(make_batch(steps), kv).logits.float())
    logits = torch.cat(found)
    return logits if target.token_ids is None else logits[:, target.token_ids]
