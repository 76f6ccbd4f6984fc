"""The suffix automaton and its drafts against their definitions, read off the whole text each time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.engine.sequence import Sequence
from foredraft.errors import ConfigError
from foredraft.propose import SuffixProposer
from foredraft.propose.automaton import SuffixAutomaton
from foredraft.propose.suffix import Memory, grow
from foredraft.sampling import Noise
from foredraft.types import Draft, SamplingParams

TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=60)


def sequence(tokens: list[int], request_id: str = "r", prompt_len: int = 1) -> Sequence:
    return Sequence(
        request_id=request_id,
        params=SamplingParams(),
        tokens=list(tokens),
        prompt_len=prompt_len,
        limit=10_000,
        noise=Noise(0),
        sink=None,
        arrived_s=0.0,
    )


def starts(text: list[int], string: list[int]) -> list[int]:
    return [i for i in range(len(text) - len(string) + 1) if text[i : i + len(string)] == string]


def longest_match(text: list[int], tokens: list[int], depth: int) -> list[int]:
    """The longest suffix of `tokens`, up to `depth`, that stands in the text."""
    sizes = range(min(depth, len(tokens)), 0, -1)
    return next((tokens[-size:] for size in sizes if starts(text, tokens[-size:])), [])


def followers(text: list[int], string: list[int]) -> Counter[int]:
    after = [i + len(string) for i in starts(text, string)]
    return Counter(text[i] for i in after if i < len(text))


def slow_tree(text: list[int], budget: int, levels: int, depth: int = 24) -> tuple[list[int], list[int]]:
    """The tokens and parents of the likeliest continuations, each weighed from the whole text."""
    tokens: list[int] = []
    parents: list[int] = []
    waiting: list[tuple[float, int, int, int, list[int]]] = []

    def look(score: float, before: list[int], node: int, level: int) -> None:
        sizes = range(min(depth, len(before)), 0, -1)
        found = next((before[-size:] for size in sizes if followers(text, before[-size:])), [])
        if not found or level > levels:
            return
        counts = followers(text, found)
        for token, count in counts.items():
            chance = score * (count / (counts.total() + 2 / len(found)))
            if chance >= 0.1:
                waiting.append((-chance, len(waiting), token, node, [*before, token]))

    def level_of(node: int) -> int:
        return 0 if node < 0 else 1 + level_of(parents[node])

    look(1.0, text, -1, 1)
    taken: set[int] = set()
    while len(tokens) < budget and (left := [entry for entry in waiting if entry[1] not in taken]):
        score, place, token, node, before = min(left)
        taken.add(place)
        tokens.append(token)
        parents.append(node)
        look(-score, before, len(tokens) - 1, level_of(len(tokens) - 1) + 1)
    return tokens, parents


@given(TEXTS, st.integers(1, 6))
def test_the_newest_place_is_where_the_text_is_found(text: list[int], depth: int) -> None:
    """After every token, as find() has it."""
    automaton = SuffixAutomaton(depth)
    for length in range(1, len(text) + 1):
        automaton.extend(text[length - 1 : length])
        assert automaton.newest == automaton.find(text[:length])


@given(TEXTS, st.lists(st.integers(0, 3), max_size=12), st.integers(1, 6))
def test_matches_and_counts_are_those_of_the_text(text: list[int], tokens: list[int], depth: int) -> None:
    automaton = SuffixAutomaton(depth)
    automaton.extend(text)
    state, length = automaton.find(tokens)
    match = longest_match(text, tokens, depth)
    assert length == len(match)
    if match:
        assert automaton.count[state] == len(starts(text, match))
        counts = {token: automaton.count[after] for token, after in automaton.follow[state].items()}
        assert counts == followers(text, match)


@given(TEXTS, st.integers(1, 6))
def test_every_string_is_counted(text: list[int], depth: int) -> None:
    automaton = SuffixAutomaton(depth)
    for token in text:
        automaton.extend([token])
    assert len(automaton) == len(text)
    assert len(automaton.link) <= 2 * len(text) + 1
    for start in range(len(text)):
        for stop in range(start + 1, min(start + depth + 1, len(text)) + 1):
            state = 0
            for token in text[start:stop]:
                state = automaton.follow[state][token]
            assert automaton.count[state] == len(starts(text, text[start:stop]))


def outline(draft: Draft) -> tuple[list[int], list[int]]:
    return draft.tokens.tolist(), list(draft.parents)


@given(TEXTS, st.lists(st.integers(1, 6), max_size=8), st.integers(0, 8), st.integers(1, 8))
def test_growing_text_is_drafted_as_defined(
    text: list[int], strides: list[int], budget: int, levels: int
) -> None:
    proposer = SuffixProposer()
    seq, seen = sequence(text[:1]), 1
    for stride in [*strides, 0]:
        seq.limit = len(seq.tokens) + 1 + levels
        (draft,) = proposer.propose([seq], [budget])
        tokens, parents = outline(draft)
        slow_tokens, slow_parents = slow_tree(seq.tokens, budget, levels)
        siblings = list(zip(parents, tokens, strict=True))
        assert len(set(siblings)) == len(siblings)
        # Equal chances may come in another order, and then the budget may cut off another of them.
        assert len(tokens) == len(slow_tokens)
        if len(tokens) < budget:
            assert paths(tokens, parents) == paths(slow_tokens, slow_parents)
        seq.tokens += text[seen : seen + stride]
        seen += stride


def paths(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return set(found)


def test_a_long_match_is_drafted_longer_than_a_short_one() -> None:
    story = list(range(100, 140))
    proposer = SuffixProposer()
    (short,) = proposer.propose([sequence([*story, 7, 100], "short")], [30])
    (long,) = proposer.propose([sequence([*story, 7, *story[:8]], "long")], [30])
    assert long.tokens.tolist() == story[8 : 8 + len(long)]
    assert 0 < len(short) < len(long) < 30


def test_what_followed_more_often_comes_first_and_a_loop_is_drafted_whole() -> None:
    text = [5, 6, 1, 5, 6, 1, 5, 6, 2, 5, 6]
    (draft,) = SuffixProposer().propose([sequence(text)], [2])
    assert (draft.tokens.tolist(), draft.parents) == ([1, 5], (-1, 0))
    (loop,) = SuffixProposer().propose([sequence([1, 2, 3] * 5)], [7])
    assert loop.tokens.tolist() == [1, 2, 3, 1, 2, 3, 1]


def test_budget_and_end_of_answer_limit_the_draft() -> None:
    proposer = SuffixProposer()
    seq = sequence([1, 2, 3] * 5)
    assert len(proposer.propose([seq], [0])[0]) == 0
    seq.limit = len(seq.tokens) + 3
    assert proposer.propose([seq], [9])[0].tokens.tolist() == [1, 2]
    seq.limit = len(seq.tokens) + 1
    assert len(proposer.propose([seq], [9])[0]) == 0


def test_tokens_that_anything_may_follow_draft_nothing() -> None:
    text = [token for other in range(1, 80) for token in (0, other)]
    assert len(SuffixProposer().propose([sequence([*text, 0])], [9])[0]) == 0


def test_forget_starts_afresh() -> None:
    proposer = SuffixProposer()
    proposer.propose([sequence([1, 2, 3] * 3)], [4])
    proposer.forget("r")
    proposer.forget("r")
    assert len(proposer.propose([sequence([5, 6, 7])], [4])[0]) == 0


def test_earlier_answers_are_remembered_only_if_allowed() -> None:
    answer = list(range(10, 30))
    for tokens, expected in ((0, []), (1000, answer[4:10])):
        proposer = SuffixProposer(memory_tokens=tokens)
        first = sequence([3, *answer], "first")
        for first.ended in (False, True):  # a proposer that failed is made to forget what goes on
            proposer.propose([first], [0])
            proposer.forget("first")
        assert sum(map(len, proposer._memory.halves if proposer._memory else ())) in (0, len(answer) + 1)
        (draft,) = proposer.propose([sequence([4, *answer[:4]], "second")], [6])
        assert draft.tokens.tolist()[: len(expected)] == expected
        assert bool(expected) == bool(len(draft))
        prompt_only = proposer.propose([sequence([3], "third")], [6])[0]
        assert len(prompt_only) == 0  # prompts are not remembered


def test_a_remembered_answer_ends_where_it_ended() -> None:
    memory = Memory(1000)
    memory.add([1, 2, 3, 4, 5, 6])
    memory.add([7, 8, 9])
    (source,) = memory.halves
    assert grow(source, source.find([1, 2, 3, 4]), 9, 9).tokens == [5, 6]


@given(st.lists(st.lists(st.integers(0, 9), max_size=30), max_size=20))
def test_memory_stays_within_its_size_and_keeps_the_newest(answers: list[list[int]]) -> None:
    memory = Memory(40)
    for answer in answers:
        memory.add(answer)
        newest = memory.halves[-1]
        kept = answer[:19]
        assert newest.find(kept)[1] == min(len(kept), newest.depth)
        assert sum(map(len, memory.halves)) <= 40


def test_too_small_a_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="memory_tokens=3"):
        SuffixProposer(memory_tokens=3)
