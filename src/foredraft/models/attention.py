"""Attention of a flat, ragged batch over the slot cache: trees, sliding windows and grouped heads are masks.

`Attend` is built once a step and travels through the model as a keyword argument. Sequences that decode and
are about as long are padded into one call; a long chunk of prompt gets a call of its own.

On a CPU in bfloat16 a few rows are attended by kernels (models/kernels) whose rows do not depend on what else
the pass holds, so that a token decoded alone and the same token in a draft get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.engine.batch import Batch, Span
from foredraft.engine.kv import KVCache
from foredraft.engine.pool import BlockPool
from foredraft.models import kernels
from foredraft.models.rows import Rows
from foredraft.tree import ancestor_mask, depths

FEW_ROWS = 32  # spans up to this size are padded together; grouped heads are folded into rows up to it
PADDED = 256  # cache positions read for nothing that cost about as much as one more call


@dataclass(frozen=True, slots=True)
class Head:
    """How a layer attends: scale of the scores, width of the sliding window, cap on the scores."""

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None


@dataclass(slots=True)
class _Group:
    """Spans attended in one call, padded to `rows` rows and `length` positions.

    rows_at: int64 [spans, rows] or a slice of the flat rows; blocks: those of each span, a slice or int64
    [spans * blocks a span]. Padding repeats row and block 0 of the span; what it computes is dropped. valid:
    int64 [real rows] into [spans * rows] (None: all are real), target_rows: int64 [real rows] into the flat
    rows.
    """

    spans: Seq[Span]
    rows: int
    length: int
    rows_at: slice | Tensor
    blocks: slice | Tensor
    valid: Tensor | None
    target_rows: Tensor | None
    masks: dict[tuple[int | None, int], Tensor | None] = field(default_factory=dict)


def quick(x: Tensor) -> bool:
    """True for what the kernels can take."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu"


class Attend:
    """One step's attention: `attend(layer, q, k, v, head)` writes the cache and reads it."""

    def __init__(self, batch: Batch, kv: KVCache, device: torch.device, dtype: torch.dtype) -> None:
        self.kv, self.device, self.dtype = kv, device, dtype
        self.positions = batch.positions
        self._spans = batch.spans

    @cached_property
    def rows(self) -> Rows | None:
        """Where all rows are written and what they see, for the kernels."""
        return Rows(self._spans) if self.kv.turned else None

    @cached_property
    def _written(self) -> slice | Tensor:
        """Where the rows go."""
        if len(self._spans) == 1 and not self.kv.turned:
            (span,) = self._spans
            found = span.table.slots(span.first_slot, span.length)
            return found if isinstance(found, slice) else found.to(self.device)
        ids = [span.table.slot_ids(span.first_slot, span.length) for span in self._spans]
        return torch.cat(ids).to(self.device)

    @cached_property
    def groups(self) -> list[_Group]:
        """The sequences by what torch attends in one call."""
        few = [span for span in self._spans if span.rows <= FEW_ROWS]
        many = [span for span in self._spans if span.rows > FEW_ROWS]
        return [self._group([span]) for span in many] + [self._group(spans) for spans in alike(few)]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, head: Head) -> Tensor:
        """query: [heads, rows, dim]; key, value: [kv_heads, rows, dim]. Returns [rows, heads, value_dim]."""
        self.kv.write(layer, self._written, key.transpose(0, 1), value.transpose(0, 1))
        shape = self.kv.shapes[layer]
        if head.softcap is not None or shape.value_dim % kernels.LEAST or self.rows is None:
            return self._read(layer, query, head)
        out = query.new_empty(query.shape[1], query.shape[0], shape.value_dim)
        self.rows.attend(query, self.kv.addresses[layer], shape, out, head.scale, head.window)
        return out

    def _read(self, layer: int, query: Tensor, head: Head) -> Tensor:
        """query: [heads, rows, dim]. Returns [rows, heads, value_dim]."""
        shape, groups = self.kv.shapes[layer], self.groups
        if len(groups) == 1 and groups[0].target_rows is None:
            return self._attend(layer, groups[0], query, head)[0]
        out = query.new_empty(query.shape[1], query.shape[0], shape.value_dim)
        for group in groups:
            found = self._attend(layer, group, query, head)
            if group.target_rows is None:
                out[group.rows_at] = found[0]
            else:
                flat = found.flatten(0, 1)
                out[group.target_rows] = flat if group.valid is None else flat[group.valid]
        return out

    def _attend(self, layer: int, group: _Group, query: Tensor, head: Head) -> Tensor:
        """Return [spans, rows, heads, value_dim]."""
        if isinstance(group.rows_at, slice):
            q = query[:, group.rows_at].unsqueeze(0)  # [1, heads, rows, dim]
        else:
            q = query[:, group.rows_at].transpose(0, 1)  # [spans, heads, rows, dim]
        k, v = (_held(store, group) for store in self.kv.read_blocks(layer, group.blocks))
        share = q.shape[1] // k.shape[1] if group.rows <= FEW_ROWS else 1
        mask = self._mask(group, head.window, share)
        return attention(q, k, v, mask, head, share).transpose(1, 2)

    def _group(self, spans: Seq[Span]) -> _Group:
        rows = max(span.rows for span in spans)
        length = max(span.length for span in spans)
        if len(spans) == 1:
            span = spans[0]
            blocks = span.table.blocks[: BlockPool.needed(length)]
            return _Group(
                spans=spans,
                rows=rows,
                length=length,
                rows_at=slice(span.start, span.stop),
                blocks=slice(blocks[0], blocks[-1] + 1) if span.table.run else self._blocks(spans, length),
                valid=None,
                target_rows=None,
            )
        rows_at = torch.stack([_padded(torch.arange(s.start, s.stop), rows) for s in spans])
        real = torch.stack([torch.arange(rows) < s.rows for s in spans])
        return _Group(
            spans=spans,
            rows=rows,
            length=length,
            rows_at=rows_at.to(self.device),
            blocks=self._blocks(spans, length),
            valid=None if bool(real.all()) else real.flatten().nonzero().flatten().to(self.device),
            target_rows=rows_at[real].to(self.device),
        )

    def _blocks(self, spans: Seq[Span], length: int) -> Tensor:
        """Return the blocks of positions 0 … length - 1 of each span, one span after another."""
        count = BlockPool.needed(length)
        blocks = [(span.table.blocks + span.table.blocks[:1] * count)[:count] for span in spans]
        return torch.tensor(blocks, dtype=torch.int64).flatten().to(self.device)

    def _mask(self, group: _Group, window: int | None, share: int) -> Tensor | None:
        """Additive mask [spans, 1, share * rows, length], or None where every row sees everything."""
        if window is not None and group.length <= window:
            window = None
        if (window, share) not in group.masks:
            seen = torch.zeros(len(group.spans), group.rows, group.length, dtype=torch.bool)
            for seq, span in enumerate(group.spans):
                seen[seq, : span.rows, : span.length] = visible(span, self.positions, window)
                seen[seq, span.rows :, 0] = True  # a padding row must see something, or softmax makes NaN
            mask = None
            if not bool(seen.all()):
                mask = torch.zeros(seen.shape, dtype=self.dtype).masked_fill_(~seen, float("-inf"))
                mask = mask.repeat(1, share, 1).unsqueeze(1).to(self.device)
            group.masks[window, share] = mask
        return group.masks[window, share]


def alike(spans: Seq[Span]) -> list[list[Span]]:
    """Group spans by length, so that no group pads by more than PADDED positions in all."""
    groups: list[list[Span]] = []
    padding = 0
    for span in sorted(spans, key=lambda span: -span.length):
        padding += groups[-1][0].length - span.length if groups else 0
        if not groups or padding > PADDED:
            groups.append([])
            padding = 0
        groups[-1].append(span)
    return groups


def _held(found: Tensor, group: _Group) -> Tensor:
    """Part keys or values [positions of all spans' blocks, kv_heads, dim] by span: [spans, kv_heads, length,
    dim].
    """
    return found.view(len(group.spans), -1, *found.shape[1:])[:, : group.length].transpose(1, 2)


def visible(span: Span, positions: Tensor, window: int | None) -> Tensor:
    """Return which cache positions each row of a span sees, bool [rows, length].

    A row sees the cache, the pending tokens up to itself, and of the draft its ancestors and itself; of all
    that, with a window, only what lies less than `window` positions back.
    """
    tokens = span.kv_len + span.pending
    seen = torch.ones(span.rows, span.length, dtype=torch.bool).tril(span.first_slot)
    if not span.is_chain:
        seen[span.pending :, tokens:] = ancestor_mask(span.parents)[span.cached_nodes :]
    if window is not None:
        seen_pos = torch.arange(span.length)
        if span.parents:
            seen_pos[tokens:] = tokens - 1 + torch.tensor(depths(span.parents))
        row_pos = positions[span.start : span.stop]
        seen &= row_pos[:, None] - seen_pos[None, :] < window
    return seen


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, head: Head, share: int = 1) -> Tensor:
    """q: [b, heads, rows, dim]; k, v: [b, kv_heads, length, ·]; mask: [b, 1, share * rows, length]. Returns
    q's layout.

    `share` heads that share a key are folded into the rows of one head: the keys are then read once a group
    instead of once a head.
    """
    b, heads, rows, _ = q.shape
    if share > 1:
        q = q.reshape(b, k.shape[1], share * rows, -1)
    return _attention(q, k, v, mask, head).reshape(b, heads, rows, -1)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, head: Head) -> Tensor:
    if head.softcap is None:
        extra: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=head.scale, **extra)
    if q.shape[1] != k.shape[1]:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    scale = q.shape[-1] ** -0.5 if head.scale is None else head.scale
    scores = torch.tanh(torch.matmul(q, k.transpose(2, 3)) * scale / head.softcap) * head.softcap
    if mask is not None:
        scores = scores + mask
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)


def _padded(ids: Tensor, length: int) -> Tensor:
    return torch.cat([ids, ids[:1].expand(length - len(ids))])
