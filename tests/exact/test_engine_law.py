"""The law of the whole engine's output over a target with a known law, for every way to draft and verify.

Each test compares counts of whole answers with the enumerated law by chi-square. The seeds are fixed; over
all seeds a correct engine would fail one of these once in a million runs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
from scipy.stats import chisquare

from fakes import ContextTarget, RandomProposer
from foredraft.control import FixedBudget
from foredraft.engine import Engine, EngineConfig
from foredraft.engine.protocols import Proposer
from foredraft.propose import DraftModelProposer, EitherProposer, NgramProposer, SuffixProposer
from foredraft.sampling import penalize, to_laws
from foredraft.types import SamplingParams, Source

VOCAB, LENGTH, RUNS = 4, 3, 2000
PROMPT = [0, 1, 2, 0, 1]
CONFIG = EngineConfig(max_seqs=50, max_len=64, max_batch_tokens=600, kv_tokens=50 * 64)


def target(**options: int) -> ContextTarget:
    return ContextTarget(VOCAB, seed=3, order=2, **options)


def proposers() -> dict[str, Proposer | None]:
    other = ContextTarget(VOCAB, seed=8, order=1)
    return {
        "plain": None,
        "ngram": NgramProposer(min_size=1),
        "suffix": SuffixProposer(memory_tokens=1000),
        "random trees": RandomProposer(target()),
        "draft model": DraftModelProposer(other, vocab_size=VOCAB, kv_tokens=50 * 64),
        "lookup or draft model": EitherProposer(
            NgramProposer(min_size=2),
            DraftModelProposer(other, vocab_size=VOCAB, kv_tokens=50 * 64),
            Source(4),
        ),
        "draft tree": DraftModelProposer(other, vocab_size=VOCAB, kv_tokens=50 * 64, tree=(2, 2, 1)),
    }


def expected(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The probability of every answer of LENGTH tokens."""
    model = target()
    found = {}
    for answer in product(range(VOCAB), repeat=LENGTH):
        chance, text = 1.0, list(PROMPT)
        for token in answer:
            history = [text[len(PROMPT) :]]
            logits = penalize(model.logits(text)[None], params, PROMPT, history, model.eos_ids)
            chance *= float(to_laws(logits, params)[0, token])
            text.append(token)
        found[answer] = chance
    return found


def counted(
    proposer: Proposer | None, params: SamplingParams, first_seed: int, model: ContextTarget
) -> Counter[tuple[int, ...]]:
    controller = FixedBudget(4) if proposer else None
    engine = Engine(model, proposer, config=CONFIG, controller=controller)
    for seed in range(RUNS):
        engine.add(PROMPT, replace(params, seed=first_seed + seed), f"r{seed}")
    answers: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            answers.setdefault(output.request_id, []).extend(output.token_ids)
    if proposer:
        assert engine.stats.drafted > 0
    return Counter(tuple(answer) for answer in answers.values())


def p_value(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """Chi-square with cells under 5 expected pooled into one."""
    assert set(counts) <= {answer for answer, chance in law.items() if chance > 0}
    large = [a for a, chance in law.items() if chance * RUNS >= 5]
    seen = [counts[a] for a in large]
    wanted = [law[a] * RUNS for a in large]
    if rest := RUNS - sum(wanted):
        seen, wanted = [*seen, RUNS - sum(seen)], [*wanted, rest]
    scale = RUNS / sum(wanted)
    return float(chisquare(seen, [w * scale for w in wanted]).pvalue)


@pytest.mark.parametrize("name", proposers())
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=LENGTH),
        SamplingParams(max_tokens=LENGTH, temperature=0.7, top_p=0.9),
        SamplingParams(max_tokens=LENGTH, top_k=3, min_p=0.1, reproducible=True),
    ],
    ids=["plain law", "top-p", "reproducible"],
)
def test_answers_follow_the_targets_law(name: str, params: SamplingParams) -> None:
    counts = counted(proposers()[name], params, 1_000_000, target())
    assert p_value(counts, expected(params)) > 1e-6


@pytest.mark.parametrize("name", ["draft model", "random trees"])
def test_processors_that_read_the_history_keep_the_law(name: str) -> None:
    params = SamplingParams(
        max_tokens=LENGTH,
        repetition_penalty=1.5,
        presence_penalty=0.6,
        frequency_penalty=-1.2,
        logit_bias={2: 0.7},
        min_p=0.05,
    )
    counts = counted(proposers()[name], params, 2_000_000, target())
    assert p_value(counts, expected(params)) > 1e-6
    assert p_value(counts, expected(SamplingParams(max_tokens=LENGTH, logit_bias={2: 0.7}))) < 1e-6


class WrongBonus(ContextTarget):
    """A planted fault: where several rows are asked for, their logits come one row late."""

    def forward(self, batch, kv, hidden_layers=()):  # type: ignore[no-untyped-def]
        out = super().forward(batch, kv, hidden_layers)
        for rows in batch.logits_of:
            part = slice(rows.start, rows.stop)
            out.logits[part] = torch.roll(out.logits[part], 1, dims=0)
        return out


def test_the_test_sees_a_wrong_row() -> None:
    params = SamplingParams(max_tokens=LENGTH)
    counts = counted(RandomProposer(target()), params, 0, WrongBonus(VOCAB, seed=3, order=2))
    assert p_value(counts, expected(params)) < 1e-6
