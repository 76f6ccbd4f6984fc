"""Who plays in tests/exact/test_engine_machine.py, and what must hold of every answer and of the cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from given import Given
from torch import Tensor

from fakes import ContextTarget, RandomProposer
from foredraft.engine import Engine, EngineConfig
from foredraft.engine.kv import KVCache
from foredraft.engine.pool import BlockPool, BlockTable
from foredraft.engine.protocols import Proposer, Sourced
from foredraft.engine.sequence import Sequence
from foredraft.propose import DraftModelProposer, EitherProposer, NgramProposer, SuffixProposer
from foredraft.sampling import penalize, to_laws
from foredraft.text import TextStream
from foredraft.types import Draft, SamplingParams, Source, Verdict

VOCAB, EOS = 5, 4
TARGET = ContextTarget(VOCAB, eos_ids=[EOS])  # one for all, as it remembers its logits
SEEN: Counter[str] = Counter()  # what the histories of this run have met


class NearTarget(ContextTarget):
    """A draft model with the target's law after two texts of three, and another law after the rest."""

    def logits(self, text: Seq[int]) -> Tensor:
        return TARGET.logits(text) if sum(text) % 3 else super().logits(text)


class Watched:
    """A proposer whose own errors are kept, since the engine survives them. `failing` plants some: before it
    has drafted, after it has, and after it has learnt.
    """

    def __init__(self, inner: Proposer, failing: bool) -> None:
        self.inner, self.needs, self.failing = inner, inner.needs, failing
        self.generator = torch.Generator().manual_seed(0)
        self.errors: list[Exception] = []

    def _plant(self) -> None:
        if self.failing and int(torch.randint(12, (1,), generator=self.generator)) == 0:
            SEEN["planted failures"] += 1
            raise RuntimeError("planted")

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        self._plant()
        drafts = self._run(self.inner.propose, seqs, budgets)
        self._plant()
        return drafts

    def observe(self, seqs: Seq[Sequence], verdicts: Seq[Verdict], hidden: Seq[tuple[Tensor, ...]]) -> None:
        self._run(self.inner.observe, seqs, verdicts, hidden)
        self._plant()

    def _run(self, method: Callable[..., Any], *args: Any) -> Any:
        try:
            return method(*args)
        except Exception as error:
            self.errors.append(error)
            raise

    def forget(self, request_id: str) -> None:
        self.inner.forget(request_id)


class WatchedSources(Watched):
    """The same for one that tells its sources."""

    def sources(self, seq: Sequence) -> tuple[Source, ...]:
        self._plant()
        return self._run(self.inner.sources, seq)  # type: ignore[attr-defined,no-any-return]


def watched(inner: Proposer, failing: bool) -> Watched:
    return (WatchedSources if isinstance(inner, Sourced) else Watched)(inner, failing)


def draft_model(model: ContextTarget, tree: tuple[int, ...] | None = None) -> Proposer:
    return DraftModelProposer(model, vocab_size=VOCAB, kv_tokens=80, tree=tree)


PROPOSERS: dict[str, Callable[[], Proposer]] = {
    "random trees": lambda: RandomProposer(TARGET),
    "random chains": lambda: RandomProposer(TARGET, chain=True),
    "ngram": lambda: NgramProposer(min_size=1),
    "suffix": lambda: SuffixProposer(memory_tokens=100),
    "same model": lambda: draft_model(TARGET),
    "near model": lambda: draft_model(NearTarget(VOCAB, seed=1)),
    "lookup or near model": lambda: EitherProposer(
        NgramProposer(min_size=2), draft_model(NearTarget(VOCAB, seed=1)), Source(7)
    ),
    "near tree": lambda: draft_model(NearTarget(VOCAB, seed=1), (3, 2, 2)),
    "far tree": lambda: draft_model(ContextTarget(VOCAB + 2, seed=1, order=1), (2, 2, 1)),
}


class Letters:
    """Stands in for a Detokenizer: token 0 is the letter a, and so on."""

    def added(self, before: int | None, token: int) -> bytes:
        return bytes([ord("a") + token])


def sink_of(params: SamplingParams) -> TextStream:
    return TextStream(Letters(), params.stop, params.min_tokens)  # type: ignore[arg-type]


@dataclass(eq=False)
class Request(Given):
    """A request and all that it was given so far."""

    prompt: list[int]
    params: SamplingParams


def alone(request: Request, room: int) -> Request:
    """The same request without drafts, in an engine of its own."""
    config = EngineConfig(max_seqs=1, max_len=room, max_batch_tokens=64, kv_tokens=room)
    plain = Engine(TARGET, config=config, make_sink=sink_of)
    plain.add(request.prompt, request.params)
    found = Request(request.prompt, request.params)
    while plain.has_work:
        found.outputs += plain.step()
    return found


def check_counts(request: Request) -> None:
    """Usage is what was emitted, and origins say where each token came from."""
    stats, origins = request.outputs[-1].stats, "".join(output.origins for output in request.outputs)
    assert stats.emitted == len(request.tokens) == len(origins)
    assert stats.accepted == origins.count("a") == sum(stats.accepted_at)
    assert stats.accepted <= stats.levels <= stats.drafted
    if request.params.logprobs is not None:
        assert len(request.logprobs) == len(request.tokens)
    if request.end == "cancelled" or not request.params.stop:  # else a stop string may have cut it
        shown = request.tokens[:-1] if request.end == "stop" else request.tokens
        assert request.text == "".join(chr(ord("a") + token) for token in shown)
    SEEN["answers: " + str(request.end)] += 1
    SEEN["accepted"] += stats.accepted
    SEEN["recovered"] += origins.count("r")


def check_equal(request: Request, room: int) -> None:
    """The answer, or what there is of a cancelled one, is that of the request alone."""
    wanted = alone(request, room)
    end = len(request.tokens)
    assert request.tokens == wanted.tokens[:end]
    assert request.logprobs == pytest.approx(wanted.logprobs[:end], abs=1e-5)
    if request.end != "cancelled":
        assert (end, request.end) == (len(wanted.tokens), wanted.end)
        assert request.text == wanted.text
    SEEN["answers compared"] += 1


def check_possible(request: Request, room: int) -> None:
    """Every token is one that the target may say there, and the answer ends where it must and not before."""
    params, text, sink = request.params, list(request.prompt), sink_of(request.params)
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else TARGET.eos_ids)}
    ended = False
    for token in request.tokens:
        assert not ended
        output = text[len(request.prompt) :]
        logits = penalize(TARGET.logits(text)[None], params, request.prompt, [output], TARGET.eos_ids)
        assert to_laws(logits, params)[0, token] > 0
        text.append(token)
        ended = sink.push([token]) is not None or token in stops
    limit = min(room, len(request.prompt) + params.max_tokens)
    reason = "stop" if ended else "length" if len(text) == limit else "cancelled"
    assert request.end == reason


def check_books(pool: BlockPool, tables: Iterable[BlockTable]) -> None:
    """No block is lost, or owned twice without being shared text."""
    users = Counter(block for table in tables for block in table.blocks)
    assert all(len(set(table.blocks)) == len(table.blocks) for table in tables)
    assert pool._users == [users[block] for block in range(pool.size)]
    assert pool.free == pool._users.count(0)
    assert pool._block_of == {key: block for block, key in pool._key_of.items()}
    assert set(pool._kept) == {block for block in pool._key_of if users[block] == 0}
    assert all(block in pool._key_of for block, owners in users.items() if owners > 1)


def stored(cache: KVCache) -> Tensor:
    """The token that each slot holds, as a ContextTarget wrote it, int64 [slots]."""
    return cache.keys[0][:, 0, 0].nan_to_num(-1).long()


def check_cache(cache: KVCache, table: BlockTable, text: list[int]) -> None:
    assert stored(cache)[table.slot_ids(0, len(text))].tolist() == text
