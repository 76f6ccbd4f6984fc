"""Who runs in the next step: decoding sequences first, then prompts in chunks, then who waits.

Running sequences are kept in order of arrival. When the cache is short the youngest one gives its blocks back
and waits, first in line, to be fed again; so the oldest always goes on and nobody starves.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from foredraft.engine.kv import KVCache
from foredraft.engine.pool import BLOCK, extend_keys
from foredraft.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Planned:
    """One sequence of a step, how many of its pending tokens are fed, and whether those are all.

    If they are all fed, tokens follow: it emits.
    """

    seq: Sequence
    feed: int
    emits: bool


class Scheduler:
    """Owns which sequences wait and which run; at most max_seqs run, and feed max_batch_tokens a step."""

    def __init__(self, *, max_seqs: int, max_batch_tokens: int, prefix_cache: bool) -> None:
        self.max_seqs, self.max_batch_tokens, self.prefix_cache = max_seqs, max_batch_tokens, prefix_cache
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, seq: Sequence) -> None:
        """Put a new sequence at the end of the line."""
        self.waiting.append(seq)

    def remove(self, seq: Sequence, kv: KVCache) -> None:
        """Take a finished or cancelled sequence out and free its blocks."""
        kv.pool.shrink(seq.table, 0)
        if seq in self.running:
            self.running.remove(seq)
        else:
            self.waiting.remove(seq)

    def pick(self, kv: KVCache) -> list[Planned]:
        """Plan one step; every planned sequence has slots for what it feeds."""
        self._admit(kv)
        plan: list[Planned] = []
        left = self.max_batch_tokens
        for seq in sorted(
            self.running, key=lambda seq: seq.pending > 1
        ):  # stable: by arrival within each kind
            feed = min(seq.pending, left)
            if feed > 0 and seq in self.running and self._make_room(seq, seq.kv_len + feed, kv, plan):
                plan.append(Planned(seq, feed, emits=feed == seq.pending))
                left -= feed
        return plan

    def _admit(self, kv: KVCache) -> None:
        """Let sequences in while the cache can hold all they have so far, and one token more.

        Text that the cache knows already is not fed again; text that a running sequence is just being fed is
        waited for, so that requests which begin alike are fed their beginning once.
        """
        pool = kv.pool
        promised = sum(max(0, pool.needed(len(s.tokens) + 1) - len(s.table.blocks)) for s in self.running)
        while self.waiting and len(self.running) < self.max_seqs:
            seq = self.waiting[0]
            if self.prefix_cache:
                extend_keys(seq.keys, seq.tokens)
            known = pool.find(seq.shareable)
            if self._is_being_fed(seq, len(known)):
                return
            need = pool.needed(len(seq.tokens) + 1) - len(known)
            if promised + need + pool.unused(known) > pool.free:
                return
            pool.share(seq.table, known)
            seq.kv_len = len(known) * BLOCK
            promised += need
            self.running.append(self.waiting.popleft())

    def _is_being_fed(self, seq: Sequence, known: int) -> bool:
        """True if a running sequence is about to fill the next block that `seq` needs."""
        lacking = seq.keys[known : known + 1]
        return any(
            lacking == running.keys[known : known + 1] and running.kv_len // BLOCK <= known
            for running in self.running
            if lacking and running.pending > 1
        )

    def _make_room(self, seq: Sequence, length: int, kv: KVCache, plan: list[Planned]) -> bool:
        """Give `seq` slots, sending the youngest away while the cache is short; False if that was `seq`
        itself.
        """
        while not kv.pool.grow(seq.table, length):
            youngest = self.running[-1]
            self.preempt(youngest, kv)
            plan[:] = [planned for planned in plan if planned.seq is not youngest]
            if youngest is seq:
                return False
        return True

    def preempt(self, seq: Sequence, kv: KVCache) -> None:
        """Take a running sequence's cache; it waits first in line and is fed again from its first token."""
        kv.pool.shrink(seq.table, 0)
        seq.kv_len = 0
        self.running.remove(seq)
        self.waiting.appendleft(seq)
