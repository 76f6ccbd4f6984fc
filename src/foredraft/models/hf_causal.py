"""Any decoder-only transformers model as a target: its own modules, our attention, our cache."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from foredraft.engine.batch import Batch, Feed, make_batch
from foredraft.engine.kv import KVCache, LayerShape
from foredraft.engine.pool import BlockTable
from foredraft.engine.protocols import ForwardOut
from foredraft.errors import ModelError
from foredraft.models.attention import Attend, Head
from foredraft.sampling import widen
from foredraft.types import NO_DRAFT

IMPLEMENTATION = "foredraft"  # our attention's name in transformers
# What models hand to their attention that says nothing about the law.
_HARMLESS = {
    "position_ids",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "cache_position",
    "cache",
}


def attention(
    module: Any,
    query: Tensor,  # [1, heads, rows, dim]
    key: Tensor,  # [1, kv_heads, rows, dim]
    value: Tensor,
    _mask: Any,
    *,
    foredraft: Attend | _Probe,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in every layer."""
    if isinstance(foredraft, _Probe):
        foredraft.note(module, other)
    head = Head(scale=scaling, window=sliding_window, softcap=softcap)
    return foredraft(module.layer_idx, query[0], key[0], value[0], head).unsqueeze(0), None


class _Probe:
    """Stands in for Attend once, to learn what the layers are and what they ask of attention."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.heads: dict[int, Head] = {}
        self.refused: set[str] = set()

    def note(self, module: Any, other: dict[str, Any]) -> None:
        self.refused |= {name for name, value in other.items() if value is not None} - _HARMLESS
        if module.layer_idx in self.shapes:
            self.refused.add(f"layer {module.layer_idx} attending twice")
        if not getattr(module, "is_causal", True):
            self.refused.add("attention that is not causal")

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, head: Head) -> Tensor:
        self.heads[layer] = head
        self.shapes[layer] = LayerShape(key.shape[0], key.shape[-1], value.shape[-1])
        return value.new_zeros(query.shape[1], query.shape[0], value.shape[-1])


class HFCausal:
    """A decoder-only transformers model behind the Target protocol.

    `model` must have been loaded with our attention (see load_target). Logits equal the model's own forward.
    token_ids: int64 [outputs], if the model was narrowed to these tokens; all others are impossible.
    """

    turns_keys = True  # where the kernels attend

    def __init__(self, model: Any, name: str, token_ids: Tensor | None = None) -> None:
        self.model, self.name, self.token_ids = model, name, token_ids
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.max_len: int = min(
            getattr(config, "max_position_embeddings", None) or 1 << 20, _fixed_len(config)
        )
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.eos_ids = _eos_ids(model)
        probe = self._probe(config.num_hidden_layers)
        self.layers = [probe.shapes[layer] for layer in range(config.num_hidden_layers)]
        self.heads = [probe.heads[layer] for layer in range(config.num_hidden_layers)]
        self._check_windows(config)

    def _check_windows(self, config: Any) -> None:
        """Raise ModelError if layers attend in windows that they put into their mask alone."""
        window = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None) or []
        silent = not any(head.window for head in self.heads)
        if kinds:
            heads = zip(kinds, self.heads, strict=False)
            silent = any(kind == "sliding_attention" and head.window is None for kind, head in heads)
        if window and window < self.max_len and silent and getattr(config, "use_sliding_window", True):
            raise ModelError(f"{self.name}: attends in windows of {window} tokens that only its mask tells")

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one position takes in the cache, over all layers."""
        return sum(layer.bytes_per_token(self.dtype) for layer in self.layers)

    def make_kv(self, tokens: int) -> KVCache:
        """Return an empty cache for `tokens` positions in all; raises CapacityError."""
        turned = self.turns_keys and self.device.type == "cpu" and self.dtype == torch.bfloat16
        turned = turned and all(layer.key_dim % 2 == 0 for layer in self.layers)
        return KVCache(self.layers, tokens, dtype=self.dtype, device=self.device, turned=turned)

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KVCache, hidden_layers: tuple[int, ...] = ()) -> ForwardOut:
        """Run all rows in one pass. hidden_layers: indices as in transformers' hidden_states, 0 the
        embedding.
        """
        out = self._run(batch, Attend(batch, kv, self.device, self.dtype), hidden_layers)
        if self.token_ids is None:
            return out
        return ForwardOut(widen(out.logits, self.token_ids, self.vocab_size), out.hidden)

    def _run(self, batch: Batch, attend: Attend | _Probe, hidden_layers: tuple[int, ...]) -> ForwardOut:
        more = {"output_hidden_states": True} if hidden_layers else {}
        out = self.model(
            input_ids=batch.token_ids.unsqueeze(0).to(self.device),
            position_ids=batch.positions.unsqueeze(0).to(self.device),
            use_cache=False,
            logits_to_keep=batch.logit_rows.to(self.device),
            foredraft=attend,
            **more,
        )
        return ForwardOut(out.logits[0], tuple(out.hidden_states[layer][0] for layer in hidden_layers))

    @torch.inference_mode()
    def _probe(self, expected: int) -> _Probe:
        """Run one token to see every layer attend; raises ModelError where that is not all there is."""
        if "logits_to_keep" not in inspect.signature(self.model.forward).parameters:
            raise ModelError(
                f"{self.name}: {type(self.model).__name__} computes no logits for chosen rows alone"
            )
        probe = _Probe()
        try:
            self._run(make_batch([Feed([0], 0, BlockTable(), NO_DRAFT)]), probe, ())
        except Exception as error:
            raise ModelError(
                f"{self.name}: {type(self.model).__name__} cannot take our attention: {error}"
            ) from error
        if probe.refused:
            odd = ", ".join(sorted(probe.refused))
            raise ModelError(f"{self.name}: its attention needs {odd}, which is not supported")
        if sorted(probe.shapes) != list(range(expected)):
            raise ModelError(
                f"{self.name}: {expected - len(probe.shapes)} of {expected} layers do not attend through "
                "transformers' attention interface, so their state cannot be rolled back: use a model whose "
                "layers all do"
            )
        return probe


def _fixed_len(config: Any) -> int:
    """Return up to which length the rotary angles of a text do not depend on what else shares its pass:
    beyond it "longrope" angles are others as soon as one text of a pass is that long. ("dynamic" ones
    change beyond max_position_embeddings.)
    """
    ropes = getattr(config, "rope_parameters", None) or {}
    each = ropes.values() if all(isinstance(rope, dict) for rope in ropes.values()) else [ropes]
    lengths = [
        rope["original_max_position_embeddings"] for rope in each if rope.get("rope_type") == "longrope"
    ]
    return min(lengths, default=1 << 20)


def _eos_ids(model: Any) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    if ids is None:
        ids = model.config.get_text_config().eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or ())
