"""A smaller model as the draft (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

It keeps its own cache. Tokens that the cache lacks, such as the last guess and the bonus after a full
acceptance, are fed together with the next draft, so there is no catch-up pass.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft import sampling
from foredraft.engine.batch import Feed, make_batch
from foredraft.engine.kv import KVCache
from foredraft.engine.pool import BLOCK, BlockTable
from foredraft.engine.protocols import Target
from foredraft.engine.sequence import Sequence
from foredraft.params import require
from foredraft.propose.guess import at_nodes, draw_of, drawn, foreseen, is_stuck
from foredraft.tree import path_to
from foredraft.types import NO_DRAFT, Draft, Needs, Verdict

_CHUNK = 512  # prompt tokens fed to the draft in one pass


@dataclass(slots=True, eq=False)
class _State:
    """What the draft's cache holds of one request: `kv_len` tokens of the text, then `fed` nodes."""

    table: BlockTable = field(default_factory=BlockTable)
    kv_len: int = 0
    fed: int = 0


@dataclass(slots=True, eq=False)
class _Growing:
    """One draft in the making, level by level."""

    seq: Sequence
    state: _State
    level_sizes: list[int]
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)  # joint log-probability of the path to each node
    laws: list[Tensor] = field(default_factory=list)  # of a drawn chain only

    @property
    def frontier(self) -> list[int]:
        """The nodes that the next level continues; -1 is the root."""
        return list(range(self.state.fed, len(self.tokens))) if self.tokens else [-1]

    def draft(self) -> Draft:
        """Return the draft as far as it has grown."""
        if not self.tokens:
            return NO_DRAFT
        tokens, parents = torch.tensor(self.tokens), tuple(self.parents)
        if not self.laws:
            return Draft(tokens, parents, draw=draw_of(self.seq.params))
        # Nothing is drawn after the last node, so the row after it is never read.
        return Draft(tokens, parents, torch.stack([*self.laws, torch.zeros_like(self.laws[0])]), "iid")


class DraftModelProposer:
    """Drafts with a smaller model of the same vocabulary: a chain, or a tree of fixed level sizes.

    A chain holds the draft's most likely tokens for greedy requests, and for sampled ones tokens drawn from
    its law under the request's own parameters; with `reproducible` they are drawn with the very noise that
    the target will use, so that the two agree as often as their laws allow (arXiv 2408.07978). A tree of
    level sizes (4, 3, 2) holds the 4 tokens that the target will likeliest say first, which for sampled
    requests depends on that noise too, the 3 likeliest continuations of those, and so on.
    """

    def __init__(
        self, model: Target, *, vocab_size: int, kv_tokens: int, tree: tuple[int, ...] | None = None
    ) -> None:
        check_tree(tree)
        self.model, self.vocab_size, self.tree = model, vocab_size, tree
        self.needs = Needs(draw="fixed" if tree else "iid")
        self._kv: KVCache = model.make_kv(kv_tokens)
        self._states: dict[str, _State] = {}

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        """Return one draft a sequence; the draft model runs once a level for all of them together."""
        drafts = [self._begin(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]
        self._catch_up([draft for draft in drafts if draft.level_sizes])
        while growing := [draft for draft in drafts if draft.level_sizes]:
            for draft, logits in zip(growing, self._next_logits(growing), strict=True):
                self._grow(draft, logits, draft.level_sizes.pop(0))
        return [draft.draft() for draft in drafts]

    def _begin(self, seq: Sequence, budget: int) -> _Growing:
        state = self._states.get(seq.request_id) or self._new(seq)
        levels = min(budget, seq.levels_left, self.model.max_len - len(seq.tokens))
        sizes = [1] * max(levels, 0) if self.tree is None else _fitted(self.tree[: max(levels, 0)], budget)
        # Vocabularies of one tokenizer may be padded differently: the draft may not know every token.
        foreign = max(seq.tokens[state.kv_len :]) >= self.model.vocab_size
        if foreign or not self._kv.pool.grow(state.table, len(seq.tokens) + sum(sizes)):
            sizes = []  # or its cache is full: this request goes on without a draft
        return _Growing(seq, state, sizes)

    def _new(self, seq: Sequence) -> _State:
        """Begin a request with the blocks that earlier ones have filled alike."""
        state = self._states[seq.request_id] = _State()
        self._kv.pool.share(state.table, self._kv.pool.find(seq.shareable))
        state.kv_len = state.table.capacity
        return state

    def _catch_up(self, drafts: Seq[_Growing]) -> None:
        """Feed long stretches of text in chunks, so that the first level finds at most one chunk pending."""
        while long := [d for d in drafts if len(d.seq.tokens) - d.state.kv_len > _CHUNK]:
            feeds = []
            for draft in long:
                start = draft.state.kv_len
                tokens = draft.seq.tokens[start : start + _CHUNK]
                feeds.append(Feed(tokens, start, draft.state.table, None))
                draft.state.kv_len += _CHUNK
            self.model.forward(make_batch(feeds), self._kv)

    def _next_logits(self, growing: Seq[_Growing]) -> list[Tensor]:
        """Feed what each cache lacks; return the logits after each node of the frontier, [nodes, vocab] a
        draft.
        """
        feeds = []
        for draft in growing:
            state, nodes = draft.state, draft.draft()
            feeds.append(Feed(draft.seq.tokens[state.kv_len :], state.kv_len, state.table, nodes, state.fed))
            state.kv_len = len(draft.seq.tokens)
        batch = make_batch(feeds)
        logits = _fit(self.model.forward(batch, self._kv).logits.float(), self.vocab_size)
        return [logits[rows.start : rows.stop] for rows in batch.logits_of]

    def _grow(self, draft: _Growing, logits: Tensor, size: int) -> None:
        """Add one level of `size` nodes below the frontier; logits: [frontier, vocab]."""
        frontier = draft.frontier
        draft.state.fed = len(draft.tokens)
        paths = [[draft.tokens[n] for n in path_to(draft.parents, node)] for node in frontier]
        logits = at_nodes(draft.seq, logits, paths)
        if is_stuck(draft.seq, logits):
            draft.level_sizes.clear()
        elif self.tree is not None:
            self._best(draft, logits, frontier, size)
        elif draft.seq.params.greedy:
            self._add(
                draft, int(sampling.argmax(sampling.add_bias(logits[0], draft.seq.params))), frontier[0]
            )
        else:
            law, token = drawn(draft.seq, logits[0], len(draft.tokens))
            draft.laws.append(law)
            self._add(draft, token, frontier[0])

    def _best(self, draft: _Growing, logits: Tensor, frontier: Seq[int], size: int) -> None:
        logits = sampling.add_bias(logits, draft.seq.params)
        depth = len(path_to(draft.parents, frontier[0]))
        every = torch.arange(self.vocab_size, device=logits.device)
        logs = torch.log_softmax(foreseen(draft.seq, logits, [depth], every), dim=-1)
        known = torch.tensor([draft.scores[node] if node >= 0 else 0.0 for node in frontier])
        best, tokens = logs.topk(min(size, logs.shape[-1]), dim=-1)
        best = best.masked_fill(best.isnan(), -torch.inf)  # of a node after which nothing is possible
        scores, places = (best + known.to(best)[:, None]).flatten().topk(min(size, best.numel()))
        for score, place in zip(scores.tolist(), places.tolist(), strict=True):
            if score > float("-inf"):  # else a grammar forbids it
                parent = frontier[place // best.shape[1]]
                self._add(draft, int(tokens.flatten()[place]), parent, score)

    @staticmethod
    def _add(draft: _Growing, token: int, parent: int, score: float = 0.0) -> None:
        draft.tokens.append(token)
        draft.parents.append(parent)
        draft.scores.append(score)

    def observe(self, seqs: Seq[Sequence], verdicts: Seq[Verdict], hidden: Seq[tuple[Tensor, ...]]) -> None:
        """Keep the accepted nodes that the cache holds, moved together behind the text."""
        sources, targets = [], []
        for seq, verdict in zip(seqs, verdicts, strict=True):
            state = self._states.get(seq.request_id)
            if state is None:  # it was not asked to draft yet
                continue
            kept = [node for node in verdict.path if node < state.fed]
            if kept != list(range(len(kept))):
                slots = state.table.slot_ids(state.kv_len, state.kv_len + state.fed)
                sources.append(slots[kept])
                targets.append(slots[: len(kept)])
            state.kv_len += len(kept)
            state.fed = 0
            self._kv.pool.remember(state.table, seq.keys[: state.kv_len // BLOCK])
        if sources:
            self._kv.move(torch.cat(sources), torch.cat(targets))

    def keep(self, seq: Sequence, length: int) -> None:
        """Note that only the first `length` tokens of a text are still what they were, or those of the chain
        drafted behind it: this instead of observe(), for texts whose end may change.
        """
        state = self._states.get(seq.request_id)
        if state is None:
            return
        # At least one token is pending, or there would be no logits to go on from.
        state.kv_len, state.fed = min(length, state.kv_len + state.fed, len(seq.tokens) - 1), 0
        assert state.kv_len >= state.table.known * BLOCK  # others may read those
        self._kv.pool.remember(state.table, seq.keys[: state.kv_len // BLOCK])

    def forget(self, request_id: str) -> None:
        """Free the request's cache."""
        state = self._states.pop(request_id, None)
        if state is not None:
            self._kv.pool.shrink(state.table, 0)


def check_tree(tree: object) -> None:
    """Raise ConfigError unless it is None or the sizes of a tree's levels."""
    sizes = tree if isinstance(tree, tuple | list) else ()
    ok = len(sizes) > 0 and all(isinstance(size, int) and size > 0 for size in sizes)
    require(tree is None or ok, "tree", tree, "the number of nodes of each level, 1 or more, as (4, 3, 2)")


def _fitted(sizes: tuple[int, ...], budget: int) -> list[int]:
    """Cut level sizes to `budget` nodes in all, from the deepest level up."""
    kept: list[int] = []
    for size in sizes:
        if budget <= 0:
            break
        kept.append(min(size, budget))
        budget -= size
    return kept


def _fit(logits: Tensor, vocab_size: int) -> Tensor:
    """Cut or pad the last dimension: models of one tokenizer may pad their vocabularies differently."""
    missing = vocab_size - logits.shape[-1]
    return F.pad(logits, (0, missing), value=float("-inf")) if missing > 0 else logits[..., :vocab_size]
