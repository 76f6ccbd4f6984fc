"""Prompt lookup against its definition, read off the whole text each time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.engine.sequence import Sequence
from foredraft.errors import ConfigError
from foredraft.propose import NgramProposer
from foredraft.sampling import Noise
from foredraft.types import SamplingParams


def sequence(tokens: list[int]) -> Sequence:
    return Sequence(
        request_id="r",
        params=SamplingParams(),
        tokens=list(tokens),
        prompt_len=1,
        limit=10_000,
        noise=Noise(0),
        sink=None,
        arrived_s=0.0,
    )


def definition(tokens: list[int], sizes: range, length: int) -> list[int]:
    """What followed the latest earlier occurrence of the longest last gram, going round."""
    for size in sizes:
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                follow = tokens[start + size :]
                return [follow[i % len(follow)] for i in range(length)]
    return []


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.lists(st.integers(1, 6), min_size=1, max_size=12),
    st.integers(1, 8),
)
def test_growing_text_is_looked_up_as_defined(text: list[int], strides: list[int], budget: int) -> None:
    proposer = NgramProposer(min_size=1, max_size=3)
    seq, seen = sequence(text[:1]), 1
    for stride in strides:
        (draft,) = proposer.propose([seq], [budget])
        assert draft.tokens.tolist() == definition(seq.tokens, range(3, 0, -1), budget)
        assert draft.parents == tuple(range(-1, len(draft) - 1))
        seq.tokens += text[seen : seen + stride]
        seen += stride


def test_budget_and_end_of_answer_limit_the_draft() -> None:
    proposer = NgramProposer(min_size=1, max_size=2)
    seq = sequence([1, 2, 3, 1, 2])
    assert proposer.propose([seq], [0])[0].tokens.tolist() == []
    assert proposer.propose([seq], [4])[0].tokens.tolist() == [3, 1, 2, 3]
    seq.limit = 7
    assert proposer.propose([seq], [4])[0].tokens.tolist() == [3]


def test_forget_starts_afresh() -> None:
    proposer = NgramProposer(min_size=1, max_size=1)
    proposer.propose([sequence([1, 2, 1])], [1])
    proposer.forget("r")
    assert proposer.propose([sequence([5, 6, 1])], [1])[0].tokens.tolist() == []


def test_sizes_are_checked() -> None:
    with pytest.raises(ConfigError, match="n-gram sizes 3 to 2"):
        NgramProposer(min_size=3, max_size=2)
