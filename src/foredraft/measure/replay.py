"""Teacher-forced replay: what would a draft have got right in answers that are already known?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from foredraft.control import FixedBudget
from foredraft.engine import Engine, EngineConfig
from foredraft.engine.batch import Batch
from foredraft.engine.kv import KVCache, LayerShape
from foredraft.engine.protocols import ForwardOut, Proposer, Target
from foredraft.types import SamplingParams, SpecStats


@dataclass(frozen=True, slots=True)
class Known:
    """A prompt and the target's own answer to it, as token ids."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(slots=True)
class _Teacher:
    """A target that says the known answer. Only a draft that asks for hidden layers makes it run the model.

    One request runs at a time, so a row's position tells what comes after it.
    """

    target: Target
    needs_model: bool
    text: list[int] = field(default_factory=list)

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset()

    @property
    def max_len(self) -> int:
        return self.target.max_len

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if not self.needs_model else self.target.device

    def make_kv(self, tokens: int) -> KVCache:
        if self.needs_model:
            return self.target.make_kv(tokens)
        return KVCache([LayerShape(1, 1, 1)], tokens, dtype=torch.float32)

    def forward(self, batch: Batch, kv: KVCache, hidden_layers: tuple[int, ...] = ()) -> ForwardOut:
        hidden = self.target.forward(batch, kv, hidden_layers).hidden if self.needs_model else ()
        places = batch.positions[batch.logit_rows.cpu()].tolist()
        logits = torch.zeros(len(places), self.vocab_size, device=self.device)
        for row, place in enumerate(places):
            if place + 1 < len(self.text):
                logits[row, self.text[place + 1]] = 1.0
        return ForwardOut(logits, hidden)


def replay(proposer: Proposer, target: Target, known: Sequence[Known], budget: int) -> list[SpecStats]:
    """Return what drafting `budget` nodes a step would have got accepted in each answer.

    The answers must be the target's own, greedy: then the counts are those of the run itself. The draft's
    times are measured, the target's are not.
    """
    longest = max(len(one.prompt) + len(one.answer) for one in known) + 1
    teacher = _Teacher(target, bool(proposer.needs.hidden_layers))
    engine = Engine(
        teacher,
        proposer,
        config=EngineConfig(max_seqs=1, max_len=longest, kv_tokens=longest + 512, prefix_cache=False),
        controller=FixedBudget(budget),
    )
    return [_one(engine, teacher, one) for one in known]


def _one(engine: Engine, teacher: _Teacher, one: Known) -> SpecStats:
    teacher.text = [*one.prompt, *one.answer]
    params = SamplingParams(temperature=0, max_tokens=len(one.answer), ignore_eos=True)
    engine.add(one.prompt, params)
    said: list[int] = []
    while True:
        for output in engine.step():
            said += output.token_ids
            if output.finish_reason is not None:
                assert said == list(one.answer)
                return output.stats
