"""The one loop: plan, draft, one target pass, verify, emit, commit. Plain decoding is a draft of length 0.

No threads and no clock of its own: whoever calls step() drives it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import count

import torch
from torch import Tensor

from foredraft.engine.account import account
from foredraft.engine.batch import Feed, make_batch
from foredraft.engine.config import EngineConfig, Load
from foredraft.engine.decide import Emission, cut, decide, emitted_logprobs
from foredraft.engine.drafter import Drafter
from foredraft.engine.interrupts import held
from foredraft.engine.news import news
from foredraft.engine.pool import BLOCK, extend_keys
from foredraft.engine.protocols import Controller, Proposer, StepTimes, Target
from foredraft.engine.scheduler import Planned, Scheduler
from foredraft.engine.sequence import Sequence, token_ids
from foredraft.engine.watch import Watch
from foredraft.errors import CapacityError, ConfigError
from foredraft.sampling import Noise
from foredraft.types import (
    Draft,
    Grammar,
    SamplingParams,
    SpecStats,
    StepOutput,
    TextSink,
    TokenLogprob,
    Verdict,
)

SinkMaker = Callable[[SamplingParams], TextSink]


class Engine:
    """Continuous batching over one target and at most one proposer. Requests join and leave at any step."""

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None = None,
        *,
        config: EngineConfig | None = None,
        controller: Controller | None = None,
        make_sink: SinkMaker | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        config = config or EngineConfig(max_len=min(EngineConfig().max_len, target.max_len))
        if config.max_len > target.max_len:
            raise ConfigError(
                f"max_len={config.max_len} exceeds the model's context: use {target.max_len} or less"
            )
        self.target, self.config = target, config
        self.drafter = Drafter(proposer, controller, target.vocab_size)
        self.stats = SpecStats()
        self._kv = target.make_kv(config.kv_tokens)
        self._scheduler = Scheduler(
            max_seqs=config.max_seqs,
            max_batch_tokens=config.max_batch_tokens,
            prefix_cache=config.prefix_cache,
        )
        self._seqs: dict[str, Sequence] = {}
        self._cancelled: list[Sequence] = []
        self._stepping, self._left = False, list[str]()  # ids cancelled while a step runs
        self._make_sink, self._clock = make_sink, clock
        self._watch = Watch(target.device, clock)
        self._names = (f"request-{number}" for number in count())

    @property
    def has_work(self) -> bool:
        """True while step() has something to do or to report."""
        return bool(self._seqs or self._cancelled)

    @property
    def load(self) -> Load:
        """How busy it is."""
        pool = self._kv.pool
        running = len(self._scheduler.running)
        return Load(running, len(self._scheduler.waiting), 1 - pool.free / pool.size)

    def add(
        self,
        prompt_ids: Seq[int],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        grammar: Grammar | None = None,
    ) -> str:
        """Queue a request and return its id. Raises ConfigError or CapacityError, and then queues nothing.

        `grammar`, this request's own, says what may be emitted.
        """
        if not isinstance(params, SamplingParams):
            raise ConfigError(f"params are {params!r}: give SamplingParams")
        try:
            prompt_ids = token_ids(prompt_ids)
        except TypeError as error:
            raise ConfigError(f"the prompt is no list of token ids: {error}") from error
        if request_id is None:
            request_id = next(name for name in self._names if not self._is_taken(name))
        self._check(prompt_ids, params, request_id)
        if grammar is not None and (params.min_tokens or params.ignore_eos):
            raise ConfigError("a grammar decides where an answer ends: leave min_tokens and ignore_eos out")
        room = min(self.config.max_len, self._kv.pool.tokens)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        seq = Sequence(
            request_id=request_id,
            params=params,
            tokens=prompt_ids,
            prompt_len=len(prompt_ids),
            limit=min(room, len(prompt_ids) + params.max_tokens),
            noise=Noise(seed),
            sink=self._make_sink(params) if self._make_sink else None,
            arrived_s=self._clock(),
            grammar=grammar,
        )
        self._seqs[request_id] = seq
        self._scheduler.add(seq)
        return request_id

    def cancel(self, request_id: str) -> None:
        """End a request and free its cache now, or as soon as the step that runs is over; the next step
        reports it as cancelled. Unknown ids are ignored.
        """
        if self._stepping:  # a stream that was forgotten is closed whenever garbage is collected
            self._left.append(request_id)
            return
        seq = self._seqs.get(request_id)
        if seq is not None:
            self._finish(seq)
            seq.stats.total_s = self._clock() - seq.arrived_s
            self._cancelled.append(seq)

    def step(self) -> list[StepOutput]:
        """Run one target pass; return what it gave each request that emitted, finished or was cancelled.

        An interrupt (Ctrl-C) is raised at its end.
        """
        with held():
            return self._whole_step()

    def _whole_step(self) -> list[StepOutput]:
        self._stepping = True
        try:
            made = self._step()
            ended = [_output(seq, Emission([], "", "cancelled"), None) for seq in self._cancelled]
            self._cancelled.clear()
        finally:
            self._stepping = False
            while self._left:
                self.cancel(self._left.pop())
        return ended + made

    def _step(self) -> list[StepOutput]:
        start = self._clock()
        plan = self._scheduler.pick(self._kv)
        if not plan:
            return []
        seqs = [planned.seq for planned in plan if planned.emits]

        draft_start = self._clock()
        drafts = self.drafter.propose(seqs, self._kv.pool, sum(planned.feed for planned in plan))
        draft_s = self._clock() - draft_start

        batch = make_batch(_feeds(plan, drafts))
        self._watch.start()
        out = self.target.forward(batch, self._kv, self.drafter.hidden_layers)
        self._watch.stop()

        logits = [out.logits[rows.start : rows.stop] for rows in batch.logits_of if rows]
        verdicts = decide(seqs, drafts, logits, self.target.eos_ids)
        emissions = [
            cut(seq, draft, verdict, self.target.eos_ids)
            for seq, draft, verdict in zip(seqs, drafts, verdicts, strict=True)
        ]
        self._commit(plan, verdicts, emissions)
        self.drafter.observe(*news(plan, verdicts, emissions, batch, out))

        now, target_s = self._clock(), self._watch.seconds()
        times = StepTimes(draft_s, target_s, now - start - draft_s - target_s, len(batch.token_ids))
        account(self.stats, plan, drafts, verdicts, emissions, times, now)
        made = []
        for seq, draft, emission, verdict, rows in zip(
            seqs, drafts, emissions, verdicts, logits, strict=True
        ):
            logprobs = emitted_logprobs(seq, verdict, emission, rows)
            made.append(_output(seq, emission, logprobs, draft.parents, verdict.path))
        self.drafter.learn(made, times)
        for seq, emission in zip(seqs, emissions, strict=True):
            if emission.finish_reason is not None:
                self._finish(seq)
        return made

    def _check(self, prompt_ids: Seq[int], params: SamplingParams, request_id: str) -> None:
        room = min(self.config.max_len, self._kv.pool.tokens)
        if not prompt_ids:
            raise ConfigError("the prompt is empty: give at least one token")
        if len(prompt_ids) >= room:
            raise CapacityError(
                f"the prompt has {len(prompt_ids)} tokens, and with one token of answer at most {room} fit: "
                "shorten it, or raise max_len or the memory for the KV cache"
            )
        vocab = self.target.vocab_size
        for name, ids in (
            ("prompt", prompt_ids),
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
        ):
            wrong = next((token for token in ids if not 0 <= token < vocab), None)
            if wrong is not None:
                raise ConfigError(f"{name} has token {wrong}, but the model's vocabulary ends at {vocab - 1}")
        ends = self.target.eos_ids | set(params.stop_token_ids)
        if params.min_tokens and len(ends) >= vocab:
            raise ConfigError(
                f"stop_token_ids and min_tokens={params.min_tokens} together ban every token: leave one out"
            )
        if params.stop and self._make_sink is None:
            raise ConfigError(f"stop={params.stop!r} needs a tokenizer, which this engine was not given")
        if self._is_taken(request_id):
            raise ConfigError(f"request_id={request_id!r} is already running: use another one")

    def _is_taken(self, request_id: str) -> bool:
        return request_id in self._seqs or any(seq.request_id == request_id for seq in self._cancelled)

    def _commit(self, plan: Seq[Planned], verdicts: Seq[Verdict], emissions: Seq[Emission]) -> None:
        """Append what was emitted; the cache keeps all of it but the last token, accepted nodes moved
        together.
        """
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        decided = iter(zip(verdicts, emissions, strict=True))
        for planned in plan:
            seq = planned.seq
            if not planned.emits:
                seq.kv_len += planned.feed
                self._remember(seq)
                continue
            verdict, emission = next(decided)
            first = len(seq.tokens)  # the position after the root
            kept = verdict.path[: len(emission.token_ids) - 1]
            if kept != tuple(range(len(kept))):
                sources.append(torch.cat([seq.table.slot_ids(first + n, first + n + 1) for n in kept]))
                targets.append(seq.table.slot_ids(first, first + len(kept)))
            seq.tokens += emission.token_ids
            if seq.grammar is not None:
                seq.grammar.advance(emission.token_ids)
            seq.kv_len = len(seq.tokens) - 1
            self._kv.pool.shrink(seq.table, len(seq.tokens))
            self._remember(seq)
        if sources:
            self._kv.move(torch.cat(sources), torch.cat(targets))

    def _remember(self, seq: Sequence) -> None:
        """Let later requests find the blocks that this one has filled."""
        full = seq.kv_len // BLOCK
        if self.config.prefix_cache and full > seq.table.known:
            extend_keys(seq.keys, seq.tokens)
            self._kv.pool.remember(seq.table, seq.keys[:full])

    def _finish(self, seq: Sequence) -> None:
        """Forget a request: its blocks are free and its id can be used again."""
        seq.ended = True
        self.drafter.forget(seq.request_id)  # while its blocks are still its own
        self._scheduler.remove(seq, self._kv)
        del self._seqs[seq.request_id]


def _feeds(plan: Seq[Planned], drafts: Seq[Draft]) -> list[Feed]:
    left = iter(drafts)
    return [
        Feed(
            tokens=planned.seq.tokens[planned.seq.kv_len : planned.seq.kv_len + planned.feed],
            kv_len=planned.seq.kv_len,
            table=planned.seq.table,
            draft=next(left) if planned.emits else None,
        )
        for planned in plan
    ]


def _output(
    seq: Sequence,
    emission: Emission,
    logprobs: list[TokenLogprob] | None,
    parents: tuple[int, ...] = (),
    path: tuple[int, ...] = (),
) -> StepOutput:
    final = emission.finish_reason is not None
    return StepOutput(
        request_id=seq.request_id,
        token_ids=emission.token_ids,
        origins=emission.origins,
        logprobs=logprobs,
        text=seq.sink.take(final=final) if seq.sink is not None else "",
        finish_reason=emission.finish_reason,
        stats=seq.stats.copy(),
        parents=parents,
        path=path,
    )
