"""A suffix automaton that counts: which strings a growing text holds, how often, and what followed them.

Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985. A state stands for all the
strings that end at the same places of the text; its link leads to the longest of their suffixes that ends at
more places. Text of n tokens makes at most 2 n states.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

Place = tuple[int, int]  # a state, and the length of the one of its strings that is meant


class SuffixAutomaton:
    """Grows by a token in constant amortised time. Strings of up to `depth` tokens have followers with
    counts: `follow[state]` maps a token to the state of the string with that token behind it, and
    `count[state]` is how often that string occurs.
    """

    __slots__ = ("_last", "_recent", "count", "depth", "follow", "length", "link")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.follow: list[dict[int, int]] = [{}]
        self.link, self.length, self.count = [-1], [0], [0]
        self._last = 0  # the state of the whole text
        self._recent: Place = (0, 0)  # the last depth + 1 tokens: the longest string that is counted

    def __len__(self) -> int:
        """The number of tokens taken in."""
        return self.length[self._last]

    def extend(self, tokens: Seq[int]) -> None:
        """Take in the next tokens of the text."""
        for token in tokens:
            self._append(token)
            self._count(token)

    def _append(self, token: int) -> None:
        follow, link = self.follow, self.link
        new = self._add({}, -1, self.length[self._last] + 1, 0)
        state, self._last = self._last, new
        while state >= 0 and token not in follow[state]:
            follow[state][token] = new
            state = link[state]
        if state < 0:
            link[new] = 0
            return
        known, wanted = follow[state][token], self.length[state] + 1
        if self.length[known] == wanted:
            link[new] = known
            return
        # The shorter strings of `known` have just ended at a place where the longer ones do not.
        clone = self._add(dict(follow[known]), link[known], wanted, self.count[known])
        link[known] = link[new] = clone
        while state >= 0 and follow[state].get(token) == known:
            follow[state][token] = clone
            state = link[state]

    def _count(self, token: int) -> None:
        """Count one more occurrence of every suffix of up to depth + 1 tokens."""
        state, length = self._end
        state, length = self._recent = self._cut(self.follow[state][token], length + 1, self.depth + 1)
        while state:
            self.count[state] += 1
            state = self.link[state]

    def _add(self, follow: dict[int, int], link: int, length: int, count: int) -> int:
        self.follow.append(follow)
        self.link.append(link)
        self.length.append(length)
        self.count.append(count)
        return len(self.link) - 1

    def _cut(self, state: int, length: int, longest: int) -> Place:
        """Drop a token from the front of a string that is one too long."""
        if length <= longest:
            return state, length
        return (self.link[state] if self.length[self.link[state]] == longest else state), longest

    def step(self, place: Place, token: int) -> Place:
        """Return the place of the longest suffix, of up to `depth` tokens, of a string with a token behind
        it that occurs.
        """
        state, length = place
        while token not in self.follow[state]:
            if not state:
                return 0, 0
            state = self.link[state]
            length = self.length[state]
        return self._cut(self.follow[state][token], length + 1, self.depth)

    @property
    def newest(self) -> Place:
        """The place of the text's last `depth` tokens: what find(text) returns, at once."""
        return self._cut(*self._end, self.depth)

    @property
    def _end(self) -> Place:
        """The place of the last depth + 1 tokens as it is now: its state may have been cloned since."""
        state, length = self._recent
        if length <= self.length[self.link[state]] and state:
            state = self.link[state]
        return state, length

    def find(self, tokens: Seq[int]) -> Place:
        """Return the place of the longest suffix of `tokens`, of up to `depth`, that occurs."""
        place = (0, 0)
        for token in tokens[-self.depth :]:
            place = self.step(place, token)
        return place

    def followed(self, place: Place) -> Place:
        """Return the place of the longest suffix of a string that anything follows; (0, 0) if none is."""
        state, length = place
        while state and not self.follow[state]:
            state = self.link[state]
            length = self.length[state]
        return state, length
