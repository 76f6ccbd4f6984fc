"""Our own engine as an arm of a measurement: several engines over one loaded target."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from foredraft.engine import Engine, EngineConfig
from foredraft.engine.pool import BLOCK
from foredraft.engine.protocols import Controller
from foredraft.errors import ConfigError, ForedraftError
from foredraft.llm import LLM
from foredraft.measure.records import Acceptance, ArmInfo, Result
from foredraft.measure.workload import Ask, Load
from foredraft.propose import load_draft, make_drafting
from foredraft.text import Detokenizer, TextStream, encode_chat, encode_prompt
from foredraft.types import SamplingParams, SpecStats, StepOutput

_MAX_SEQS = 16  # for arrivals by rate
_SOURCE = "the engine's own counts"


@dataclass(frozen=True, slots=True)
class Job:
    """A request in the engine's own terms."""

    ask: Ask
    prompt: list[int]
    params: SamplingParams


def params_of(body: Mapping[str, Any], where: str) -> SamplingParams:
    """Return the sampling of an OpenAI body; raises ConfigError on a field that is not honoured."""
    known = {item.name for item in fields(SamplingParams)}
    values: dict[str, Any] = {}
    for name, value in body.items():
        if name in ("messages", "prompt"):
            continue
        if name == "logit_bias":
            values[name] = {int(token): float(bias) for token, bias in value.items()}
        elif name == "logprobs":
            values[name] = int(body.get("top_logprobs") or 0) if isinstance(value, bool) else value
        elif name == "top_logprobs":
            continue
        elif name == "foredraft" and isinstance(value, Mapping):
            values |= {key: what for key, what in value.items() if key != "trace"}  # of a stream's form only
        elif name in known:
            values[name] = tuple(value) if isinstance(value, list) else value
        else:
            raise ConfigError(
                f"{where} asks for {name}={value!r}, which the engine does not take: leave it out"
            )
    if body.get("logprobs") is False:
        values.pop("logprobs", None)
    try:
        return SamplingParams(**values)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{where}: {error}") from error


class Bench:
    """One loaded target with its tokenizer, and the engines over it."""

    def __init__(self, llm: LLM, *, max_seqs: int, max_len: int) -> None:
        self.llm, self.max_seqs, self.max_len = llm, max_seqs, max_len
        self.target = llm.engine.target
        self._detokenizer = Detokenizer(llm.tokenizer)

    def encode(self, ask: Ask) -> Job:
        """Return a request as the engine takes it; raises ConfigError naming its line."""
        try:
            if "messages" in ask.body:
                prompt = encode_chat(self.llm.tokenizer, ask.body["messages"])
            else:
                prompt = encode_prompt(self.llm.tokenizer, ask.body["prompt"])
        except ConfigError as error:
            raise ConfigError(f"{ask.where}: {error}") from error
        return Job(ask, prompt, params_of(ask.body, ask.where))

    def engine(
        self,
        draft: str,
        budget: int | Literal["auto"] = "auto",
        *,
        tree: tuple[int, ...] | None = None,
        controller: Controller | None = None,
    ) -> Engine:
        """Return an engine that drafts by `draft` ("none": not at all); raises what loading it does."""
        kv_tokens = self.max_seqs * (self.max_len + BLOCK)
        target: Any = self.target
        model = load_draft(draft, target=target, tokenizer=self.llm.tokenizer)
        drafting = make_drafting(
            draft,
            model,
            vocab_size=self.target.vocab_size,
            kv_tokens=kv_tokens,
            budget=budget,
            tree=tree if model is not None else None,
            target=target,
        )
        return Engine(
            self.target,
            drafting.proposer,
            config=EngineConfig(
                max_seqs=self.max_seqs,
                max_len=self.max_len,
                max_batch_tokens=max(512, self.max_seqs),
                kv_tokens=kv_tokens,
                prefix_cache=False,
            ),
            controller=controller if controller and drafting.proposer else drafting.controller,
            make_sink=lambda params: TextStream(self._detokenizer, params.stop, params.min_tokens),
        )


@dataclass(slots=True)
class _Live:
    """A request that is running."""

    job: Job
    start: float
    outputs: list[StepOutput] = field(default_factory=list)
    first_s: float | None = None
    last_s: float = 0.0


class EngineArm:
    """Answers requests with one engine at a load, timed by the clock that its engine has."""

    counter = "ids"

    def __init__(
        self,
        name: str,
        draft: str,
        engine: Engine,
        bench: Bench,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name, self.draft, self.engine, self.bench, self._clock = name, draft, engine, bench, clock
        self._jobs: dict[str, Job] = {}

    @property
    def info(self) -> ArmInfo:
        """How the header names it."""
        llm = self.bench.llm
        return ArmInfo(
            self.name, "engine", llm.model_path.name, self.draft, f"this process, {llm.dtype}", "ids"
        )

    def connect(self, endpoint: str) -> None:
        """Nothing to find out."""

    def warm_up(self, asks: Sequence[Ask], enough: Callable[[float], bool]) -> None:
        """Answer requests one by one until `enough`, told each one's seconds per token, is satisfied."""
        for ask in asks:
            results: list[Result] = []
            self.run([ask], Load(concurrency=1), 0, 0.0, results.append)
            if enough(results[0].total_s / max(results[0].emitted, 1)):
                return

    def begin(self) -> None:
        """Nothing to read: every result tells its own acceptance."""

    def end(self, results: Sequence[Result]) -> Acceptance | None:
        """See begin."""
        return None

    def run(
        self, asks: Sequence[Ask], load: Load, block: int, origin: float, keep: Callable[[Result], None]
    ) -> None:
        """Answer the requests at a load, handing over each result as it comes."""
        jobs = [self._job(ask) for ask in asks]
        waiting = deque(zip(jobs, load.arrivals(len(jobs), block), strict=True))
        most = load.concurrency or len(jobs)
        live: dict[str, _Live] = {}
        begun = self._clock()
        try:
            while waiting or live:
                now = self._clock()
                while waiting and len(live) < most and begun + waiting[0][1] <= now:
                    job, arrival = waiting.popleft()
                    self._add(job, begun + arrival if load.rate else now, load, block, origin, live, keep)
                if live:
                    self._step(live, load, block, origin, keep)
                elif waiting:
                    time.sleep(max(0.0, begun + waiting[0][1] - self._clock()))
        finally:
            for request_id in live:
                self.engine.cancel(request_id)
            if live:
                self.engine.step()  # takes the reports of what was cancelled

    def _job(self, ask: Ask) -> Job:
        if ask.id not in self._jobs:
            self._jobs[ask.id] = self.bench.encode(ask)
        return self._jobs[ask.id]

    def _add(
        self,
        job: Job,
        start: float,
        load: Load,
        block: int,
        origin: float,
        live: dict[str, _Live],
        keep: Callable[[Result], None],
    ) -> None:
        try:
            live[self.engine.add(job.prompt, job.params)] = _Live(job, start)
        except ForedraftError as error:
            head = (job.ask.id, job.ask.category, self.name, load.label, block)
            keep(Result(*head, start_s=start - origin, total_s=0.0, error=str(error)))

    def _step(
        self, live: dict[str, _Live], load: Load, block: int, origin: float, keep: Callable[[Result], None]
    ) -> None:
        outputs = self.engine.step()
        now = self._clock()
        for output in outputs:
            one = live[output.request_id]
            one.outputs.append(output)
            one.last_s = now
            if one.first_s is None:
                one.first_s = now
            if output.finish_reason is not None:
                del live[output.request_id]
                keep(self._result(one, load, block, origin))

    def _result(self, one: _Live, load: Load, block: int, origin: float) -> Result:
        ids = tuple(token for output in one.outputs for token in output.token_ids)
        last = one.outputs[-1]
        assert one.first_s is not None
        return Result(
            id=one.job.ask.id,
            category=one.job.ask.category,
            arm=self.name,
            load=load.label,
            block=block,
            start_s=one.start - origin,
            total_s=one.last_s - one.start,
            ttft_s=one.first_s - one.start,
            emitted=len(ids),
            first_tokens=len(one.outputs[0].token_ids),
            chunks=len(one.outputs),
            finish=last.finish_reason,
            text="".join(output.text for output in one.outputs),
            ids=ids,
            acceptance=engine_acceptance(last.stats),
        )

    def close(self) -> None:
        """Nothing is open."""


def engine_acceptance(stats: SpecStats) -> Acceptance:
    """Return the counts of one request."""
    return Acceptance(
        source=_SOURCE,
        steps=stats.steps,
        drafted=stats.drafted,
        levels=stats.levels,
        accepted=stats.accepted,
        emitted=stats.emitted,
        accepted_at=tuple(stats.accepted_at),
    )


def open_bench(llm: LLM, asks: Sequence[Ask], loads: Sequence[Load]) -> Bench:
    """Return a bench wide and long enough for the requests at all loads; raises ConfigError."""
    longest = 0
    wide = max([load.concurrency or _MAX_SEQS for load in loads])
    probe = Bench(llm, max_seqs=1, max_len=llm.max_len)
    for ask in asks:
        job = probe.encode(ask)
        longest = max(longest, len(job.prompt) + job.params.max_tokens)
    return Bench(llm, max_seqs=wide, max_len=min(longest + 1, llm.engine.target.max_len))
