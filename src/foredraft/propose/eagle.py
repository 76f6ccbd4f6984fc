"""EAGLE: one decoder layer that goes on where the target's features end (Li et al., arXiv 2401.15077), with
fused features (EAGLE-3, arXiv 2503.01840) and a tree grown by confidence (EAGLE-2, arXiv 2406.16858).
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from math import exp
from typing import Any

import torch
from torch import Tensor

from foredraft import sampling
from foredraft.engine.batch import Batch, Feed, make_batch
from foredraft.engine.kv import KVCache, LayerShape
from foredraft.engine.pool import BLOCK
from foredraft.engine.sequence import Sequence
from foredraft.models.attention import Attend, quick
from foredraft.models.buckets import Bucket, Inputs, Outputs, Passes
from foredraft.models.compiled_head import CompiledEagle, Waiting, can_compile_head
from foredraft.models.fast_head import FastEagle
from foredraft.models.heads import EagleLayer, PlainEagle
from foredraft.models.kernels import BEST, LEVELS
from foredraft.propose.guess import at_nodes, draw_of, drawn, foreseen, future, is_processed, is_stuck, luck
from foredraft.tree import path_to
from foredraft.types import NO_DRAFT, Draft, Draw, Needs, Verdict

_FEW, _MANY = 128, 512  # features of prompts, and of answers, that wait for a draft; more are fed at once
_ROWS = 8  # features that go through all of the head with the last one: more are read into its cache first
_WIDTH, _LEVELS = BEST, LEVELS  # nodes of a level that are continued, and candidates below each; levels
_SPARE = 8  # nodes that are fed beyond the budget, if there are slots, to find better ones
_WORTH = 0.15  # chance that a level's best nodes are all right so far, under which no deeper level is tried


@dataclass(slots=True, eq=False)
class _State:
    """Hidden states of a request that the cache does not hold yet, those of each step apart, how many there
    are, and of which position the first is.
    """

    seq: Sequence
    first: int
    count: int
    steps: list[tuple[Tensor, ...]]

    @property
    def current(self) -> bool:
        """False if the request has lost its slots since."""
        return self.first + self.count == self.seq.kv_len

    @property
    def shareable(self) -> bool:
        """True if others may begin with blocks in which the head has positions to read."""
        return self.current and self.first < min(self.seq.table.known * BLOCK, self.seq.kv_len - 1)

    def add(self, layers: tuple[Tensor, ...]) -> None:
        """Add the states of a step, [rows, hidden] of each layer."""
        self.steps.append(tuple(layer.clone() for layer in layers))  # not what the whole step computed
        self.count += len(layers[0])

    def take(self, left: int = 0) -> Tensor:
        """Return all but the last `left` as features [rows, fused width]; what is left waits."""
        found = torch.cat([torch.cat(layers, dim=-1) for layers in self.steps])
        taken = len(found) - left
        self.first, self.count = self.first + taken, left
        self.steps = [(found[taken:],)] if left else []
        return found[:taken]


@dataclass(slots=True, eq=False)
class _Growing:
    """A tree in the making. Candidate c: its token, the fed node it hangs from (-1: the root), and the joint
    log-probability of the path to it. Fed nodes are candidates that the head has continued.
    """

    seq: Sequence
    budget: int
    levels: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    fed: list[int] = field(default_factory=list)  # the candidate of each fed node
    features: Tensor | None = None  # [fed nodes, hidden], or the root's [1, hidden]
    frontier: int = 0  # fed nodes below this are continued already
    depth: int = 0  # levels it has
    laws: list[Tensor] = field(default_factory=list)  # of a drawn chain only

    def add(self, token: int, parent: int, score: float) -> None:
        """Add a candidate."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(score)

    def fed_draft(self) -> Draft:
        """Return the fed nodes as a draft."""
        tokens = torch.tensor([self.tokens[c] for c in self.fed], dtype=torch.int64)
        return Draft(tokens, tuple(self.parents[c] for c in self.fed))

    def draft(self) -> Draft:
        """Return the best candidates, best first, as many as the budget allows: none without its parent,
        which is likelier.
        """
        kept = sorted(range(len(self.tokens)), key=lambda c: (-self.scores[c], c))[: self.budget]
        if not kept:
            return NO_DRAFT
        node_of = {candidate: node for node, candidate in enumerate(kept)}
        parents = [-1 if self.parents[c] < 0 else node_of[self.fed[self.parents[c]]] for c in kept]
        tokens = torch.tensor([self.tokens[c] for c in kept])
        if not self.laws:
            return Draft(tokens, tuple(parents), draw=draw_of(self.seq.params))
        return Draft(tokens, tuple(parents), torch.stack([*self.laws, torch.zeros_like(self.laws[0])]), "iid")


class EagleProposer:
    """Drafts with an EAGLE head: a tree of the tokens that the target will likeliest say, which for sampled
    requests depends on the noise that it will draw with, or for these, if `drawn`, a chain from its law.

    The head's cache has the slots of the target's: what the head read at a position lies where the target's
    own keys do, so a shared beginning of a prompt is shared here too. embedding [vocab, hidden] and lm_head
    [draft vocab, hidden], which a head with a projection of its own does not need, are the target's.
    """

    def __init__(
        self, head: EagleLayer, *, embedding: Tensor, lm_head: Tensor, kv_tokens: int, drawn: bool = False
    ) -> None:
        config = head.config
        self.head, self.drawn = head, drawn
        draw: Draw = "iid" if drawn else "fixed"
        self.needs = Needs(hidden_layers=config.hidden_layers, draw=draw, spare_slots=_SPARE)
        self.target_ids = head.target_ids
        own = head.lm_head.weight.detach() if head.lm_head is not None else lm_head
        compiled = CompiledEagle if can_compile_head(head, embedding) else FastEagle
        fast = compiled if config.plain else PlainEagle
        self._fast: FastEagle | CompiledEagle | PlainEagle = fast(head, embedding, own.to(embedding.dtype))
        shape = LayerShape(config.kv_heads, config.head_dim, config.head_dim)
        dtype, device = embedding.dtype, embedding.device
        self._kv = KVCache([shape], kv_tokens, dtype=dtype, device=device, turned=quick(embedding))
        recorded = embedding.device.type == "cuda" and config.plain
        self._passes = Passes(self._pass, embedding.new_zeros(0, config.hidden_size)) if recorded else None
        self._states: dict[str, _State] = {}

    @torch.inference_mode()
    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        """Return one draft a sequence; the head runs once a level for all of them together."""
        drafts = [self._begin(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]
        growing = [draft for draft in drafts if draft.levels > 0]
        if isinstance(self._fast, CompiledEagle):
            growing = self._grow_all(self._fast, growing)
        while growing:
            logits = self._next_logits(growing)
            for draft, rows in zip(growing, logits, strict=True):
                self._grow(draft, rows)
            growing = [draft for draft in growing if self._continue(draft)]
        return [draft.draft() for draft in drafts]

    def _begin(self, seq: Sequence, budget: int) -> _Growing:
        state = self._states.get(seq.request_id)
        ready = state is not None and state.first + state.count == len(seq.tokens) - 1
        return _Growing(seq, budget, min(budget, seq.levels_left, _LEVELS) if ready else 0)

    def _grow_all(self, fast: CompiledEagle, growing: Seq[_Growing]) -> list[_Growing]:
        """Grow at once the trees of requests whose laws have no processors; return the others."""
        states = [self._states[draft.seq.request_id] for draft in growing]
        self._feed([state for state in states if state.count > _ROWS])
        plain = [draft for draft in growing if not self._has_own_law(draft)]
        if plain:
            begun = []
            for draft in plain:
                seq, state = draft.seq, self._states[draft.seq.request_id]
                first = state.first
                begun.append(
                    Waiting(
                        seq.tokens[first + 1 :],
                        state.take(),
                        first,
                        seq.table,
                        draft.budget,
                        draft.levels,
                        luck(seq.params),
                        future(seq, range(draft.levels)),
                    )
                )
            for draft, grown in zip(plain, fast.grow(begun, self._kv, _WORTH), strict=True):
                draft.tokens, draft.parents, draft.scores, draft.fed = grown
        return [draft for draft in growing if not draft.tokens]

    def _has_own_law(self, draft: _Growing) -> bool:
        """True if what the head says is changed before its likeliest tokens are looked for."""
        params = draft.seq.params
        drawn = self.drawn and not params.greedy
        return drawn or is_processed(draft.seq) or bool(params.logit_bias)

    def _next_logits(self, growing: Seq[_Growing]) -> list[Tensor]:
        """Feed what waits, or the newest fed nodes; return the logits after each, float32 [nodes, draft
        vocab] a draft.
        """
        feeds, features = [], []
        for draft in growing:
            seq, state = draft.seq, self._states[draft.seq.request_id]
            if not draft.tokens:
                feeds.append(Feed(seq.tokens[state.first + 1 :], state.first, seq.table, NO_DRAFT))
                features.append(self._fast.fuse(state.take()))
            else:
                nodes = draft.fed_draft()
                feeds.append(Feed([], len(seq.tokens) - 1, seq.table, nodes, draft.frontier))
                assert draft.features is not None
                features.append(draft.features)
        batch = make_batch(feeds)
        out, logits = self._run(batch, features[0] if len(features) == 1 else torch.cat(features))
        found = []
        for draft, rows in zip(growing, batch.logits_of, strict=True):
            draft.features, draft.frontier = out[rows.start : rows.stop], len(draft.fed)
            found.append(logits[rows.start : rows.stop])
        return found

    def _run(self, batch: Batch, features: Tensor) -> tuple[Tensor, Tensor]:
        """Write the head's cache; return its output [outputs, hidden] and logits [outputs, draft vocab]."""
        bucket = Bucket.of(batch) if self._passes is not None else None
        if self._passes is not None and bucket is not None:
            inputs, (out,) = self._passes.run(batch, bucket, self._kv, features=features)
            out = out[inputs.real[: len(features)]][batch.logit_rows.to(out.device)]
            return out, self._in_torch.logits(out)
        return self._fast.run(batch, features, Attend(batch, self._kv, self._kv.device, features.dtype))

    def _pass(self, inputs: Inputs, attend: Any, _kind: Hashable) -> Outputs:
        """A pass of fixed shape; models/buckets.py."""
        return (self._in_torch(inputs.tokens, inputs.positions, inputs.features, attend),)

    @property
    def _in_torch(self) -> FastEagle:
        assert isinstance(self._fast, FastEagle)
        return self._fast

    def _grow(self, draft: _Growing, logits: Tensor) -> None:
        """Add the candidates of one level; logits: [nodes, draft vocab], after the root or the newest fed
        nodes.
        """
        params, depth = draft.seq.params, draft.depth
        draft.levels, draft.depth = draft.levels - 1, depth + 1
        nodes = list(range(draft.frontier - len(logits), draft.frontier)) if draft.fed else [-1]
        if self.drawn and not params.greedy:
            self._draw(draft, self._processed(draft, logits, nodes)[0], nodes[0])
            return
        if is_processed(draft.seq) or params.logit_bias:
            full = self._processed(draft, logits, nodes)
            logits = sampling.add_bias(full, params)[..., self.target_ids]
        logits = foreseen(draft.seq, logits, [depth], self.target_ids)
        best, ids = torch.log_softmax(logits, -1).topk(min(_WIDTH, logits.shape[-1]), -1)
        tokens = self.target_ids[ids]
        first = len(draft.tokens)
        for node, row_scores, row_tokens in zip(nodes, best.tolist(), tokens.tolist(), strict=True):
            above = draft.scores[draft.fed[node]] if node >= 0 else 0.0
            for score, token in zip(row_scores, row_tokens, strict=True):
                if score > float("-inf"):  # else a grammar forbids it
                    draft.add(token, node, above + score)
        self._choose(draft, first)

    def _choose(self, draft: _Growing, first: int) -> None:
        """Mark for the next level the best of the newest candidates, below which others can still get into
        the draft.
        """
        newest = sorted(range(first, len(draft.tokens)), key=lambda c: -draft.scores[c])[:_WIDTH]
        ranked = sorted(draft.scores, reverse=True)
        least = ranked[draft.budget - 1] if len(ranked) >= draft.budget else float("-inf")
        room = draft.seq.table.capacity - len(draft.seq.tokens) + 1  # a fed node takes a slot
        room = min(room, _WIDTH * _LEVELS) - len(draft.fed)
        chosen = [c for c in newest if draft.scores[c] > least][:room]
        if draft.levels <= 0 or sum(exp(draft.scores[c]) for c in chosen) < _WORTH:
            return
        assert draft.features is not None
        rows = [draft.parents[c] - (draft.frontier - len(draft.features)) for c in chosen]
        draft.features = draft.features[rows]
        draft.fed += chosen

    def _continue(self, draft: _Growing) -> bool:
        return draft.levels > 0 and len(draft.fed) > draft.frontier

    def _draw(self, draft: _Growing, logits: Tensor, node: int) -> None:
        """Go on with a chain by one token drawn from the head's law."""
        if is_stuck(draft.seq, logits):
            draft.levels = 0
            return
        law, token = drawn(draft.seq, logits, len(draft.tokens))
        draft.laws.append(law)
        draft.add(token, node, 0.0)
        if draft.levels > 0:
            draft.fed.append(len(draft.tokens) - 1)

    def _processed(self, draft: _Growing, logits: Tensor, nodes: Seq[int]) -> Tensor:
        """Return logits [nodes, vocab] over the target's vocabulary, under the request's processors."""
        parents = [draft.parents[c] for c in draft.fed]
        paths = [[draft.tokens[draft.fed[n]] for n in path_to(parents, node)] for node in nodes]
        full = sampling.widen(logits, self.target_ids, self.head.config.vocab_size)
        return at_nodes(draft.seq, full, paths)

    @torch.inference_mode()
    def observe(self, seqs: Seq[Sequence], verdicts: Seq[Verdict], hidden: Seq[tuple[Tensor, ...]]) -> None:
        """Keep the features of what joined the cache; feed them if they are many, or if a request began with
        blocks that may be theirs.
        """
        shared = False
        for seq, layers in zip(seqs, hidden, strict=True):
            first = seq.kv_len - len(layers[0])
            state = self._states.get(seq.request_id)
            if state is None or state.first + state.count != first:
                state = self._states[seq.request_id] = _State(seq, first, 0, [])
                shared = shared or first > 0
            state.add(layers)
        every = self._states.values()
        self._feed([state for state in every if _is_much(state) or (shared and state.shareable)])

    def _feed(self, states: Seq[_State]) -> None:
        """Feed all waiting features but the last, with which the next draft begins."""
        if not states:
            return
        feeds = [
            Feed(state.seq.tokens[state.first + 1 : state.seq.kv_len], state.first, state.seq.table, None)
            for state in states
        ]
        features = [state.take(left=1) for state in states]
        if isinstance(self._fast, CompiledEagle):
            rows = zip(feeds, features, strict=True)
            self._fast.grow([Waiting(f.tokens, some, f.kv_len, f.table) for f, some in rows], self._kv)
        else:
            self._run(make_batch(feeds), self._fast.fuse(torch.cat(features)))

    @torch.inference_mode()
    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request, but not what later ones may begin with."""
        state = self._states.pop(request_id, None)
        if state is not None and state.shareable:
            self._feed([state])


def _is_much(state: _State) -> bool:
    """True if more waits than is kept for a draft that may never come."""
    in_prompt = state.seq.kv_len <= state.seq.prompt_len
    return state.current and state.count > (_FEW if in_prompt else _MANY)
