"""Llama, its kin and Gemma 3 on a CPU in bfloat16: all layers in one compiled call that the threads share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from foredraft.engine.batch import Batch
from foredraft.engine.kv import KVCache, LayerShape
from foredraft.engine.protocols import ForwardOut
from foredraft.errors import CheckpointError
from foredraft.models import kernels, threads
from foredraft.models.formats.files import stored_tensors
from foredraft.models.fused import KnownAngles, can_fuse
from foredraft.models.hf_causal import HFCausal
from foredraft.models.outline import Outline
from foredraft.models.rows import Rows
from foredraft.models.tiles import Tiles
from foredraft.models.trial import agree, trial
from foredraft.sampling import widen

_QKV, _GATE_UP = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
)


class CompiledCausal(HFCausal):
    """A Llama-like model behind the Target protocol, with the weights of a directory of safetensors. Raises
    CheckpointError if one is not there.
    """

    def __init__(self, outline: Outline, path: Path, token_ids: Tensor | None = None) -> None:
        self.outline, self.name, self.token_ids, self.model = outline, str(path), token_ids, None
        self.vocab_size, self.max_len = outline.vocab_size, outline.max_len
        self.eos_ids = frozenset(outline.eos_ids)
        self.device, self.dtype = torch.device("cpu"), torch.bfloat16
        self.layers = [LayerShape(outline.keys, outline.dim, outline.dim) for _ in outline.windows]
        self._shape = (outline.hidden, outline.inner, outline.queries, outline.keys, outline.dim)
        self._outputs = self.vocab_size if token_ids is None else len(token_ids)
        self._gelu, self._eps, self._scale = int(outline.is_gemma), outline.eps, outline.scale * kernels.LOG2E
        self._angles = [KnownAngles(angles) for angles in outline.angles]
        weights = _Weights(outline, path, self._outputs)
        self._layers = np.array(
            [
                [*_described(weights, f"model.layers.{layer}.", outline.is_gemma), window, turned]
                for layer, (window, turned) in enumerate(zip(outline.windows, outline.turned_by, strict=True))
            ],
            np.int64,
        )
        ending = (weights.norm("model.norm"), weights.head(token_ids), weights.bias("lm_head"))
        self._ending, self._tiles = np.array(ending, np.int64), weights.tiles
        scale = outline.embed_scale
        self._embed_scale = None if scale == 1 else torch.tensor(scale).bfloat16()
        # Left in its file, of which only the rows that are used come to memory.
        self._embedding = weights["model.embed_tokens.weight"]

    def _embedded(self, token_ids: Tensor) -> Tensor:
        """token_ids: int64 [rows]. Returns [rows, hidden]."""
        x = self._embedding[token_ids]
        return x if self._embed_scale is None else x * self._embed_scale

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KVCache, hidden_layers: tuple[int, ...] = ()) -> ForwardOut:
        """See HFCausal.forward."""
        rows, outputs, layers = len(batch.token_ids), len(batch.logit_rows), len(self._layers)
        (hidden, inner, queries, keys, dim), vocab = self._shape, self._outputs
        x = self._embedded(batch.token_ids)
        last = int(batch.positions.max())
        known = [angles.until(last) for angles in self._angles]
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
            np.array(
                [[part.data_ptr() for part in (a.cos, a.sin, batch.positions)] for a in known], np.int64
            ),
            copies,
            self._ending,
            np.array(sizes, np.int64),
            np.array((*work, *ending), np.int64),
            np.array(seen, np.int64),
            self._eps,
            self._scale,
        )
        most = max(hidden, inner, queries * dim)
        threads.share(kernels.run_layers, told, kernels.own_bytes(size, max(rows, outputs), most))
        if self.token_ids is not None:
            logits = widen(logits, self.token_ids, self.vocab_size)
        return ForwardOut(logits, tuple(states[layer] for layer in wanted))


def _behind(*parts: Tensor) -> Tensor:
    return torch.cat(parts)


class _Weights:
    """The weights of a directory, laid out in tiles by the names that transformers gives them."""

    def __init__(self, outline: Outline, path: Path, outputs: int) -> None:
        self._path, self._outline, self._read = path, outline, stored_tensors(path)
        heads, hidden, inner = outline.queries * outline.dim, outline.hidden, outline.inner
        qkv = (heads + 2 * outline.keys * outline.dim, hidden)
        layer = [qkv, (hidden, heads), (2 * inner, hidden), (hidden, inner)]
        self.tiles = Tiles([*layer * len(outline.windows), (outputs, hidden)])

    def __getitem__(self, name: str) -> Tensor:
        found = self._read(name)
        if found is None:
            raise CheckpointError(f"{self._path} holds no {name}: its layout is not known here")
        return found.bfloat16()

    def norm(self, name: str) -> int:
        """The weights of a norm; 0 for none. Gemma's are what they are above 1."""
        found = self._read(f"{name}.weight")
        return 0 if found is None else self.tiles.vector(found.bfloat16().float() + self._outline.is_gemma)

    def product(self, *names: str, together: Callable[..., Tensor] = _behind) -> int:
        """The weights of linear layers that are one product."""
        return self.tiles.product(together(*(self[f"{name}.weight"] for name in names)))

    def bias(self, *names: str, together: Callable[..., Tensor] = _behind) -> int:
        """Their biases, put together likewise."""
        if self._read(f"{names[0]}.bias") is None:
            return self.tiles.no_bias
        return self.tiles.vector(together(*(self[f"{name}.bias"][:, None] for name in names))[:, 0])

    def head(self, token_ids: Tensor | None) -> int:
        """The output layer, for some tokens or all."""
        weight = self["model.embed_tokens.weight" if self._outline.tied else "lm_head.weight"]
        return self.tiles.product(weight if token_ids is None else weight[token_ids])


def _described(weights: _Weights, layer: str, is_gemma: bool) -> Iterator[int]:
    """Yield a layer as kernels.run_layers takes it, up to its window."""
    qkv, gate_up = ([layer + name for name in names] for names in (_QKV, _GATE_UP))
    out, down = layer + "self_attn.o_proj", layer + "mlp.down_proj"
    between = layer + "post_attention_layernorm"
    yield weights.norm(layer + "input_layernorm")
    yield weights.product(*qkv)
    yield weights.bias(*qkv)
    yield weights.norm(layer + "self_attn.q_norm")
    yield weights.norm(layer + "self_attn.k_norm")
    yield weights.product(out)
    yield weights.bias(out)
    yield weights.norm(between) if is_gemma else 0
    yield weights.norm(layer + "pre_feedforward_layernorm" if is_gemma else between)
    yield weights.product(*gate_up, together=kernels.interleaved)
    yield weights.bias(*gate_up, together=kernels.interleaved)
    yield weights.product(down)
    yield weights.bias(down)
    yield weights.norm(layer + "post_feedforward_layernorm") if is_gemma else 0


def can_compile(target: HFCausal) -> bool:
    """True for an architecture known here, in bfloat16 on a CPU that has what the kernels are made of, of
    widths that they take.
    """
    known = target.dtype == torch.bfloat16 and kernels.IS_QUICK and can_fuse(target)
    return known and Outline.of(target) is not None


def compile_layers(slow: HFCausal) -> CompiledCausal | None:
    """Return the compiled twin of a target, or None where the two disagree. Either way `slow` is used up."""
    wanted, outline = trial(slow), Outline.of(slow)
    assert outline is not None
    slow.model = None  # its weights are freed before they are laid out
    try:
        compiled = CompiledCausal(outline, Path(slow.name), slow.token_ids)
    except CheckpointError:
        return None
    return compiled if agree(trial(compiled), wanted, compiled.dtype) else None
