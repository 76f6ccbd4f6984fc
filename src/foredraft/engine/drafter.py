"""Drafting as the engine sees it: budgets, guesses, and what happens when a proposer or controller fails."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from operator import index

import torch
from torch import Tensor

from foredraft.engine.pool import BLOCK, BlockPool
from foredraft.engine.protocols import Controller, Keeping, Proposer, Resting, Sourced, StepTimes
from foredraft.engine.sequence import Sequence
from foredraft.errors import ConfigError
from foredraft.tree import depths
from foredraft.types import NO_DRAFT, Draft, StepOutput, Verdict

_log = logging.getLogger(__name__)


class Drafter:
    """A proposer and its controller. A request for which the proposer raises, or drafts what cannot be
    verified, goes on without drafts; if the controller raises, all do.
    """

    def __init__(
        self, proposer: Proposer | None, controller: Controller | None, vocab_size: int = sys.maxsize
    ) -> None:
        if (proposer is None) != (controller is None):
            raise ConfigError("a proposer needs a controller, and a controller needs a proposer")
        self.proposer, self.controller, self._vocab_size = proposer, controller, vocab_size
        self._sourced = proposer if isinstance(proposer, Sourced) else None
        self._off: set[str] = set()  # requests that go on without drafts
        self._resting = controller if isinstance(controller, Resting) else None

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The layers whose hidden states the proposer wants."""
        return self.proposer.needs.hidden_layers if self.proposer is not None else ()

    def propose(self, seqs: list[Sequence], pool: BlockPool, batch_tokens: int) -> list[Draft]:
        """Return one draft a sequence, for which its table has slots, already while it is made."""
        drafts = dict.fromkeys(seqs, NO_DRAFT)
        wanted = self._wanted(seqs, batch_tokens)
        if wanted and self.proposer is not None:
            drafting, budgets = list(wanted), _spare(wanted, pool)
            for seq, budget in zip(drafting, budgets, strict=True):
                grown = pool.grow(seq.table, len(seq.tokens) + budget)
                assert grown
            if self.proposer.needs.spare_slots:
                for seq, budget in zip(drafting, budgets, strict=True):
                    if budget:  # if there is room
                        pool.grow(seq.table, len(seq.tokens) + budget + self.proposer.needs.spare_slots)
            found = self._propose(drafting, budgets)
            for seq, budget in zip(drafting, budgets, strict=True):
                drafts[seq] = self._checked(seq, found[seq], budget)
                pool.shrink(seq.table, len(seq.tokens) + len(drafts[seq]))
        return list(drafts.values())

    def _wanted(self, seqs: list[Sequence], batch_tokens: int) -> dict[Sequence, int]:
        """Return the sequences that may draft, and how many nodes the controller gives each."""
        drafting = [seq for seq in seqs if seq.request_id not in self._off]
        if not drafting or self.controller is None:
            return {}
        chosen = all(seq.params.budget == "auto" for seq in drafting)
        try:
            if chosen and self._resting is not None and self._resting.rests(len(drafting), batch_tokens):
                return {}
            drafting = [seq for seq in drafting if self._offered(seq)]
            if not drafting:
                return {}
            budgets = [index(budget) for budget in self.controller.budgets(drafting, batch_tokens)]
            if len(budgets) != len(drafting) or min(budgets) < 0:
                raise ValueError(f"the budgets of {len(drafting)} sequences are {budgets}")
        except Exception as error:
            self._give_up(error)
            return {}
        return dict(zip(drafting, budgets, strict=True))

    def _offered(self, seq: Sequence) -> bool:
        """Note what could draft next, if the proposer tells; False if it fails."""
        if self._sourced is not None:
            try:
                seq.sources = self._sourced.sources(seq)
                seq.source = next(iter(seq.sources), None)
            except Exception as error:
                self._switch_off(seq, error)
                return False
        return True

    def _propose(self, seqs: list[Sequence], budgets: list[int]) -> dict[Sequence, Draft]:
        """Ask for all drafts at once; if that fails, one by one, to find out whose fault it is."""
        assert self.proposer is not None
        try:
            return dict(zip(seqs, self.proposer.propose(seqs, budgets), strict=True))
        except Exception as error:
            if len(seqs) == 1:
                self._switch_off(seqs[0], error)
                return {seqs[0]: NO_DRAFT}
            drafts: dict[Sequence, Draft] = {}
            for seq, budget in zip(seqs, budgets, strict=True):
                self._forget(self.proposer, seq.request_id)  # how far it came is unknown
                drafts |= self._propose([seq], [budget])
            return drafts

    def _checked(self, seq: Sequence, draft: Draft, budget: int) -> Draft:
        """Return the draft if it can be verified, else none."""
        try:
            _check(draft, budget, seq.levels_left, self._vocab_size)
        except Exception as error:
            self._switch_off(seq, error)
            return NO_DRAFT
        return draft

    def observe(self, seqs: Seq[Sequence], verdicts: Seq[Verdict], hidden: Seq[tuple[Tensor, ...]]) -> None:
        """Tell the proposer what became of its drafts."""
        if self.proposer is None:
            return
        kept = [row for row in zip(seqs, verdicts, hidden, strict=True) if row[0].request_id not in self._off]
        if not kept:
            return
        drafting = [seq for seq, _, _ in kept]
        try:
            self.proposer.observe(drafting, [v for _, v, _ in kept], [h for _, _, h in kept])
        except Exception as error:  # how far it came is unknown, so nobody's state can be trusted
            for seq in drafting:
                self._switch_off(seq, error)

    def learn(self, outputs: Seq[StepOutput], times: StepTimes) -> None:
        """Tell the controller what the step gave and took."""
        if self.controller is not None:
            try:
                self.controller.observe([o for o in outputs if o.request_id not in self._off], times)
            except Exception as error:
                self._give_up(error)

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request."""
        self._off.discard(request_id)
        self._forget(self.proposer, request_id)
        self._forget(self.controller, request_id)

    def _forget(self, part: Proposer | Controller | None, request_id: str) -> None:
        if isinstance(part, Keeping):
            try:
                part.forget(request_id)
            except Exception as error:
                _log.warning("%s failed to forget %s: %r", type(part).__name__, request_id, error)

    def _switch_off(self, seq: Sequence, error: Exception) -> None:
        _log.warning("%s goes on without drafts: the proposer failed: %r", seq.request_id, error)
        self.forget(seq.request_id)
        self._off.add(seq.request_id)

    def _give_up(self, error: Exception) -> None:
        _log.warning("no request is drafted for any more: the controller failed: %r", error)
        self.proposer = self.controller = self._sourced = self._resting = None


def _check(draft: Draft, budget: int, levels: int, vocab_size: int) -> None:
    """Raise ValueError for a draft that no step can verify."""
    nodes, laws = len(draft), draft.laws
    if nodes > budget:
        raise ValueError(f"a draft has {nodes} nodes, and the budget was {budget}")
    if nodes > levels and max(depths(draft.parents)) > levels:
        raise ValueError(f"a draft has more than the {levels} levels that are left")
    if not nodes:
        return
    tokens, plain = draft.tokens.tolist(), draft.tokens.dim() == 1 and draft.tokens.dtype == torch.int64
    if not plain or min(tokens) < 0 or max(tokens) >= vocab_size:
        raise ValueError(f"a draft has the tokens {tokens}: give int64, each from 0 to {vocab_size - 1}")
    if laws is not None and draft.is_drawn:
        shape = (nodes + 1, laws.shape[-1] if vocab_size == sys.maxsize else vocab_size)
        if laws.shape != shape or not laws.is_floating_point():
            raise ValueError(f"the laws of a draft are {laws.dtype} {tuple(laws.shape)}, not float {shape}")


def _spare(wanted: Mapping[Sequence, int], pool: BlockPool) -> list[int]:
    """Cut budgets to what the request allows, what can still be emitted and the slots that are left."""
    budgets = []
    free = pool.free
    for seq, auto in wanted.items():
        budget = auto if seq.params.budget == "auto" else seq.params.budget
        room = len(seq.table.blocks) * BLOCK - len(seq.tokens) + free * BLOCK
        budgets.append(min(budget, room) if seq.levels_left > 0 else 0)
        free -= max(0, pool.needed(len(seq.tokens) + budgets[-1]) - len(seq.table.blocks))
    return budgets
