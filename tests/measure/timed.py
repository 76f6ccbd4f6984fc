"""Engines whose time is counted and not spent: a target, and proposers of each kind, that move one clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from fakes import ContextTarget
from foredraft.control import AcceptanceBudget, FixedBudget
from foredraft.engine import Engine, EngineConfig
from foredraft.engine.protocols import Controller
from foredraft.measure import run
from foredraft.measure.advise import Method
from foredraft.measure.engine_arm import EngineArm, Job
from foredraft.measure.records import RecordFile
from foredraft.measure.replay import Known
from foredraft.measure.stats import speedup
from foredraft.measure.workload import Ask, Load
from foredraft.propose import NgramProposer
from foredraft.propose.draft_model import DraftModelProposer
from foredraft.propose.medusa import grow, tree_of
from foredraft.types import NO_DRAFT, Needs, SamplingParams, Source

VOCAB, LONGEST = 13, 4


class Clock:
    """Seconds that somebody says have passed."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedTarget(ContextTarget):
    """A pass reads the weights or computes, whichever takes longer; every sequence takes some more."""

    def __init__(self, clock: Clock, *, scale: float = 1.0, blur: float = 0.0) -> None:
        super().__init__(VOCAB, order=2, sharpness=2.0)
        self.clock, self.scale, self.blur = clock, scale, blur

    def logits(self, text: Sequence[int]) -> torch.Tensor:
        """Those of the target, blurred."""
        other = torch.Generator().manual_seed(hash((99, *text[-2:])) % 2**63)
        return super().logits(text) + self.blur * torch.randn(VOCAB, generator=other)

    def forward(self, batch: Any, kv: Any, hidden_layers: tuple[int, ...] = ()) -> Any:
        rows = len(batch.token_ids)
        handed_s = 2e-6 * rows * len(hidden_layers)
        self.clock.now += self.scale * (max(0.010, 0.0006 * rows) + 2e-4 * len(batch.spans)) + handed_s
        return super().forward(batch, kv, hidden_layers)


class TimedNgram(NgramProposer):
    """A lookup, which takes a little for each sequence."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def sources(self, seq: Any) -> Any:
        return tuple(replace(source, longest=LONGEST) for source in super().sources(seq))

    def propose(self, seqs: Any, budgets: Any) -> Any:
        self.clock.now += 1e-4 * len(seqs)
        return super().propose(seqs, budgets)


class TimedHeads:
    """Best-first trees of a blurred target: all levels at once as Medusa, or one after another as EAGLE,
    which also reads the prompt.
    """

    needs = Needs(hidden_layers=(1,))

    def __init__(self, clock: Clock, *, level_s: float, once_s: float, read_s: float) -> None:
        self.guess = TimedTarget(Clock(), blur=0.7)
        self.clock, self.level_s, self.once_s, self.read_s = clock, level_s, once_s, read_s
        self.ready: set[str] = set()

    def propose(self, seqs: Any, budgets: Any) -> Any:
        drafts = [self._one(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]
        if any(len(draft) for draft in drafts):
            self.clock.now += self.once_s + self.level_s * max(max(budgets) // 2, 1)
        return drafts

    def _one(self, seq: Any, budget: int) -> Any:
        levels = min(budget, seq.levels_left, 4)
        if levels <= 0 or seq.request_id not in self.ready:
            return NO_DRAFT
        scores, tokens, text = [], [], list(seq.tokens)
        for _ in range(levels):
            best, ids = torch.log_softmax(self.guess.logits(text), -1).topk(4)
            scores.append(best.tolist())
            tokens.append(ids.tolist())
            text.append(tokens[-1][0])
        return tree_of(grow(scores, budget), tokens)

    def observe(self, seqs: Any, verdicts: Any, hidden: Any) -> None:
        self.ready |= {seq.request_id for seq in seqs}
        self.clock.now += self.read_s * sum(len(layers[0]) for layers in hidden)

    def forget(self, request_id: str) -> None:
        self.ready.discard(request_id)


def methods(clock: Clock) -> dict[str, Method]:
    """A method of each kind."""
    tree = Source(LONGEST, tree=True)
    model = TimedTarget(clock, scale=0.15, blur=0.7)
    kinds: dict[str, tuple[Callable[[int], Any], Source]] = {
        "ngram": (lambda tokens: TimedNgram(clock), Source(LONGEST)),
        "medusa": (lambda tokens: TimedHeads(clock, level_s=0.0, once_s=8e-4, read_s=0.0), tree),
        "eagle": (lambda tokens: TimedHeads(clock, level_s=1e-3, once_s=4e-4, read_s=2e-5), tree),
        "model": (
            lambda tokens: DraftModelProposer(model, vocab_size=VOCAB, kv_tokens=tokens),
            Source(LONGEST),
        ),
    }
    return {
        name: Method(name, make, lambda source=source: AcceptanceBudget(source), LONGEST)  # type: ignore[misc]
        for name, (make, source) in kinds.items()
    }


def engine(target: Any, load: int, method: Method | None, budget: int | None, clock: Clock) -> Engine:
    """An engine as measure makes it; budget None: the controller's."""
    controller: Controller | None = None
    if method is not None:
        controller = method.controller() if budget is None else FixedBudget(budget)
    return Engine(
        target,
        method.make(4096 * load) if method is not None else None,
        config=EngineConfig(max_seqs=load, max_len=200, kv_tokens=load * 256, prefix_cache=False),
        controller=controller,
        clock=clock,
    )


def traffic(count: int) -> tuple[Known, ...]:
    """Prompts of many lengths, and the target's own answers, of many lengths too."""
    target = TimedTarget(Clock())
    found = []
    for place in range(count):
        text = [(place * k + 1) % VOCAB for k in range(3, 11 + 7 * (place % 5))]
        prompt, length = tuple(text), 12 + 7 * (place % 4)
        for _ in range(length):
            text.append(int(target.logits(text).argmax()))
        found.append(Known(prompt, tuple(text[len(prompt) :])))
    return tuple(found)


def measured(
    known: Sequence[Known], load: int, method: Method, budgets: Sequence[int | None], clock: Clock
) -> list[float]:
    """The speed-ups with some budgets over plain decoding, as measure finds them."""
    asks = [
        Ask(str(n), "all", {"max_tokens": len(one.answer), "seed": n}, "here") for n, one in enumerate(known)
    ]

    def encode(ask: Ask) -> Job:
        one = known[int(ask.id.partition("@")[0])]
        params = SamplingParams(temperature=0, max_tokens=len(one.answer))
        return Job(ask, list(one.prompt), params)

    fake = SimpleNamespace(model_path=Path("fake"), dtype="float32")
    bench: Any = SimpleNamespace(encode=encode, llm=fake)
    engines = [engine(TimedTarget(clock), load, None, None, clock)]
    engines += [engine(TimedTarget(clock), load, method, budget, clock) for budget in budgets]
    arms = [EngineArm(str(n), "fake", one, bench, clock) for n, one in enumerate(engines)]
    file = RecordFile(None, run.make_header(arms, [Load(concurrency=load)], asks, 0))
    run.measure(arms, asks, [Load(concurrency=load)], file)
    plain, *drafted = (file.record.pick(arm.name, str(load)) for arm in arms)
    found = [speedup(results, plain) for results in drafted]
    return [one.value for one in found if one is not None]
