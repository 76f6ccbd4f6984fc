"""Spans of about the same length are attended in one call."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from foredraft.engine.batch import Span
from foredraft.engine.pool import BlockTable
from foredraft.models.attention import PADDED, alike


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=40))
def test_groups_hold_every_span_once_and_little_padding(lengths: list[int]) -> None:
    spans = [Span(i, 1, (), length - 1, BlockTable(), 0) for i, length in enumerate(lengths)]
    groups = alike(spans)
    assert sorted(span.start for group in groups for span in group) == list(range(len(spans)))
    for group in groups:
        longest = max(span.length for span in group)
        assert sum(longest - span.length for span in group) <= PADDED
    for one, other in pairwise(groups):
        assert sum(one[0].length - span.length for span in [*one, other[0]]) > PADDED


def test_no_span_no_group() -> None:
    assert alike([]) == []
