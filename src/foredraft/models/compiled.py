"""Llama, its kin and Gemma 3 on a CPU in bfloat16: all layers in one compiled call that the threads share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foredraft.engine.batch import Batch
from foredraft.engine.kv import KVCache
from foredraft.engine.protocols import ForwardOut
from foredraft.models import kernels, threads
from foredraft.models.fused import (
    KINDS,
    FusedGemma,
    KnownAngles,
    Rotary,
    agree,
    can_fuse,
    has_fixed_angles,
    norm,
    trial,
)
from foredraft.models.hf_causal import HFCausal
from foredraft.models.rows import Rows
from foredraft.models.tiles import Tiles
from foredraft.sampling import widen


class CompiledCausal(HFCausal):
    """A Llama-like model behind the Target protocol. Takes the weights out of `slow`, which then is of no
    use.
    """

    def __init__(self, slow: HFCausal) -> None:
        vars(self).update(vars(slow))
        inner, head = self.model.model, self.model.lm_head
        attention = inner.layers[0].self_attn
        hidden, dim = self.model.config.hidden_size, attention.head_dim
        queries, keys = (part.out_features // dim for part in (attention.q_proj, attention.k_proj))
        self._shape = (hidden, inner.layers[0].mlp.gate_proj.out_features, queries, keys, dim)
        self._outputs, self._gelu = head.out_features, int(_is_gemma(self.model.config))
        self._eps, self._scale = norm(inner.norm).eps, (self.heads[0].scale or dim**-0.5) * kernels.LOG2E
        self.embedding = inner.embed_tokens
        together = [*chain.from_iterable(map(_linears, inner.layers)), [head]]
        tiles = Tiles((sum(part.out_features for part in some), some[0].in_features) for some in together)
        kinds = list(dict.fromkeys(_kind(layer) for layer in inner.layers))
        self._angles = [_angles(inner.rotary_emb, self.embedding.weight[:1], kind) for kind in kinds]
        described = []
        for layer, how in zip(inner.layers, self.heads, strict=True):
            described.append([*self._described(layer, tiles), how.window or 0, kinds.index(_kind(layer))])
            layer.to("meta")  # its weights are freed before the next layer's are laid out
        self._layers = np.array(described, np.int64)
        ending = (tiles.norm(inner.norm), tiles.product(head.weight), tiles.bias([head]))
        self._ending = np.array(ending, np.int64)
        self._tiles, self.model = tiles, None

    def _described(self, layer: Any, tiles: Tiles) -> Iterator[int]:
        """Yield a layer as kernels.run_layers takes it, up to its window."""
        attention, mlp = layer.self_attn, layer.mlp
        qkv, out, gate_up, down = _linears(layer)
        gemma = hasattr(layer, "pre_feedforward_layernorm")
        yield tiles.norm(layer.input_layernorm)
        yield tiles.product(torch.cat([part.weight.detach() for part in qkv]))
        yield tiles.bias(qkv)
        yield tiles.norm(getattr(attention, "q_norm", None))
        yield tiles.norm(getattr(attention, "k_norm", None))
        yield tiles.product(attention.o_proj.weight)
        yield tiles.bias(out)
        yield tiles.norm(layer.post_attention_layernorm if gemma else None)
        yield tiles.norm(layer.pre_feedforward_layernorm if gemma else layer.post_attention_layernorm)
        yield tiles.product(kernels.interleaved(*(part.weight.detach() for part in gate_up)))
        yield tiles.bias(gate_up, kernels.interleaved)
        yield tiles.product(mlp.down_proj.weight)
        yield tiles.bias(down)
        yield tiles.norm(layer.post_feedforward_layernorm if gemma else None)

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KVCache, hidden_layers: tuple[int, ...] = ()) -> ForwardOut:
        """See HFCausal.forward."""
        rows, outputs, layers = len(batch.token_ids), len(batch.logit_rows), len(self._layers)
        (hidden, inner, queries, keys, dim), vocab = self._shape, self._outputs
        x = self.embedding(batch.token_ids)
        tables = [angles(batch.positions) for angles in self._angles]
        wanted = [layer % (layers + 1) for layer in hidden_layers]
        states, copies = {layer: torch.empty_like(x) for layer in wanted}, np.zeros(layers + 1, np.int64)
        for layer, state in states.items():
            copies[layer] = state.data_ptr()
        # What the passes work in: normed, qkv, attended, gated, what is added to x, and the wanted rows.
        widths = (hidden, (queries + 2 * keys) * dim, queries * dim, inner, hidden)
        parts = np.array([0, *(rows * width for width in widths)], np.int64).cumsum()
        room = x.new_empty(int(parts[-1]) + outputs * hidden)
        normed, qkv, attended, gated, more, gathered = room.data_ptr() + x.itemsize * parts
        logits = x.new_empty(outputs, vocab)
        phases = layers * kernels.PHASES + kernels.ENDING
        board = np.zeros(phases * kernels.PHASE_BYTES // 8, np.int64)
        work = (board.ctypes.data, x.data_ptr(), normed, qkv, attended, gated, more)
        ending = (batch.logit_rows.data_ptr(), gathered, logits.data_ptr())
        sight = Rows(batch.spans)
        seen, size = sight.told(queries, keys, dim, dim)
        sizes = (rows, *self._shape, vocab, outputs, self._gelu, sight.written.ctypes.data, sight.count)
        told = (
            self._layers,
            kv.addresses,
            np.array([[part.data_ptr() for part in table] for table in tables], np.int64),
            copies,
            self._ending,
            np.array(sizes, np.int64),
            np.array((*work, *ending), np.int64),
            np.array(seen, np.int64),
            self._eps,
            self._scale,
        )
        threads.share(kernels.run_layers, told, size)
        if self.token_ids is not None:
            logits = widen(logits, self.token_ids, self.vocab_size)
        return ForwardOut(logits, tuple(states[layer] for layer in wanted))


def can_compile(target: HFCausal) -> bool:
    """True for an architecture known here, in bfloat16 on a CPU, of widths that the kernels take."""
    if target.dtype != torch.bfloat16 or not can_fuse(target):
        return False
    layer = target.model.model.layers[0]
    dim = layer.self_attn.head_dim
    even = all(part.in_features % 2 == 0 for parts in _linears(layer) for part in parts)
    one = len({head.scale for head in target.heads}) == 1 and target.heads[0].softcap is None
    return even and one and dim % kernels.LEAST == 0


def compile_layers(slow: HFCausal) -> CompiledCausal | None:
    """Return the compiled twin of a target, or None where the two disagree. Either way `slow` is used up."""
    wanted = trial(slow)
    compiled = CompiledCausal(slow)
    return compiled if agree(trial(compiled), wanted, slow.dtype) else None


def _linears(layer: Any) -> list[list[Any]]:
    """The linear layers, those together that read the same input."""
    attention, mlp = layer.self_attn, layer.mlp
    return [
        [attention.q_proj, attention.k_proj, attention.v_proj],
        [attention.o_proj],
        [mlp.gate_proj, mlp.up_proj],
        [mlp.down_proj],
    ]


def _kind(layer: Any) -> str:
    """Which angles a layer has, where a model has several."""
    attention = layer.self_attn
    return attention.config.layer_types[attention.layer_idx] if _is_gemma(attention.config) else ""


def _is_gemma(config: Any) -> bool:
    return KINDS[config.model_type] is FusedGemma


def _angles(rotary: Any, like: Tensor, kind: str) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Return what gives positions tables of cos and sin, and where in them each position is."""
    make = partial(Rotary.of, partial(rotary, layer_type=kind) if kind else rotary, like)
    if not has_fixed_angles(rotary, kind):
        return lambda positions: (*_parts(make(positions)), torch.arange(len(positions)))
    known = KnownAngles(make)
    return lambda positions: (*_parts(known.until(int(positions.max()))), positions)


def _parts(rotary: Rotary) -> tuple[Tensor, Tensor]:
    return rotary.cos, rotary.sin
