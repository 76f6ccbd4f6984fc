"""Drafting as the engine sees it: budgets, guesses, and what happens when a proposer fails."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq

from torch import Tensor

from foredraft.engine.pool import BLOCK, BlockPool
from foredraft.engine.protocols import Controller, Keeping, Proposer, Resting, Sourced, StepTimes
from foredraft.engine.sequence import Sequence
from foredraft.errors import ConfigError
from foredraft.types import NO_DRAFT, Draft, StepOutput, Verdict

_log = logging.getLogger(__name__)


class Drafter:
    """A proposer and its controller. A request for which the proposer raises goes on without drafts."""

    def __init__(self, proposer: Proposer | None, controller: Controller | None) -> None:
        if (proposer is None) != (controller is None):
            raise ConfigError("a proposer needs a controller, and a controller needs a proposer")
        self.proposer, self.controller = proposer, controller
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
        drafting = self._drafting(seqs)
        chosen = bool(drafting) and all(seq.params.budget == "auto" for seq in drafting)
        if chosen and self._resting is not None and self._resting.rests(len(drafting), batch_tokens):
            return list(drafts.values())
        drafting = [seq for seq in drafting if self._offered(seq)]
        if drafting and self.proposer is not None and self.controller is not None:
            wanted = self.controller.budgets(drafting, batch_tokens)
            budgets = _spare(drafting, wanted, pool)
            for seq, budget in zip(drafting, budgets, strict=True):
                grown = pool.grow(seq.table, len(seq.tokens) + budget)
                assert grown
            if self.proposer.needs.spare_slots:
                for seq, budget in zip(drafting, budgets, strict=True):
                    if budget:  # if there is room
                        pool.grow(seq.table, len(seq.tokens) + budget + self.proposer.needs.spare_slots)
            drafts |= self._propose(drafting, budgets)
            for seq in drafting:
                pool.shrink(seq.table, len(seq.tokens) + len(drafts[seq]))
        return list(drafts.values())

    def _offered(self, seq: Sequence) -> bool:
        """Note what could draft next, if the proposer tells; False if it fails."""
        if self._sourced is not None:
            try:
                seq.sources = self._sourced.sources(seq)
            except Exception as error:
                self._switch_off(seq, error)
                return False
            seq.source = next(iter(seq.sources), None)
        return True

    def _propose(self, seqs: list[Sequence], budgets: list[int]) -> dict[Sequence, Draft]:
        """Ask for all drafts at once; if that fails, one by one, to find out whose fault it is."""
        assert self.proposer is not None
        try:
            found = dict(zip(seqs, self.proposer.propose(seqs, budgets), strict=True))
            for draft, budget in zip(found.values(), budgets, strict=True):
                if len(draft) > budget:
                    raise ValueError(f"a draft has {len(draft)} nodes, and the budget was {budget}")
            return found
        except Exception as error:
            if len(seqs) == 1:
                self._switch_off(seqs[0], error)
                return {seqs[0]: NO_DRAFT}
            drafts: dict[Sequence, Draft] = {}
            for seq, budget in zip(seqs, budgets, strict=True):
                self._forget(seq.request_id)  # how far it came is unknown
                drafts |= self._propose([seq], [budget])
            return drafts

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
            self.controller.observe([o for o in outputs if o.request_id not in self._off], times)

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request."""
        self._off.discard(request_id)
        if self.controller is not None:
            self._forget(request_id)
        if isinstance(self.controller, Keeping):
            self.controller.forget(request_id)

    def _forget(self, request_id: str) -> None:
        assert self.proposer is not None
        try:
            self.proposer.forget(request_id)
        except Exception as error:
            _log.warning("the proposer failed to forget %s: %r", request_id, error)

    def _drafting(self, seqs: Seq[Sequence]) -> list[Sequence]:
        return [] if self.proposer is None else [seq for seq in seqs if seq.request_id not in self._off]

    def _switch_off(self, seq: Sequence, error: Exception) -> None:
        _log.warning("%s goes on without drafts: the proposer failed: %r", seq.request_id, error)
        self.forget(seq.request_id)
        self._off.add(seq.request_id)


def _spare(seqs: Seq[Sequence], wanted: Seq[int], pool: BlockPool) -> list[int]:
    """Cut budgets to what the request allows, what can still be emitted and the slots that are left."""
    budgets = []
    free = pool.free
    for seq, auto in zip(seqs, wanted, strict=True):
        budget = auto if seq.params.budget == "auto" else seq.params.budget
        room = len(seq.table.blocks) * BLOCK - len(seq.tokens) + free * BLOCK
        budgets.append(min(budget, room) if seq.levels_left > 0 else 0)
        free -= max(0, pool.needed(len(seq.tokens) + budgets[-1]) - len(seq.table.blocks))
    return budgets
