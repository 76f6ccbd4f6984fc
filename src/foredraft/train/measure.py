"""What a draft is worth: held-out prompts answered with it."""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.control import FixedBudget
from foredraft.engine import Engine, EngineConfig
from foredraft.engine.protocols import Proposer
from foredraft.models import HFCausal
from foredraft.train.collect import Answer
from foredraft.types import SamplingParams, SpecStats

MEASURED = SamplingParams(temperature=0, max_tokens=64)
_SEQS = 8


def draft_with(
    target: HFCausal,
    proposer: Proposer,
    answers: Sequence[Answer],
    budget: int,
) -> SpecStats:
    """Answer the prompts of `answers` anew, drafting `budget` nodes at every step."""
    longest = max(len(answer.prompt_ids) for answer in answers) + MEASURED.max_tokens
    config = EngineConfig(
        max_seqs=_SEQS, max_len=min(longest, target.max_len), kv_tokens=kv_tokens(answers), prefix_cache=False
    )
    engine = Engine(target, proposer, config=config, controller=FixedBudget(budget))
    for answer in answers:
        engine.add(answer.prompt_ids, MEASURED)
    while engine.has_work:
        engine.step()
    return engine.stats


def kv_tokens(answers: Sequence[Answer]) -> int:
    """Return how large the caches of draft_with are."""
    return _SEQS * (max(len(answer.prompt_ids) for answer in answers) + MEASURED.max_tokens + 64)
