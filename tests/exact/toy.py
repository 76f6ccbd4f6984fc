"""A target and a draft whose laws depend on the whole path, over a handful of tokens; and random trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.sampling import Noise
from foredraft.types import Draft, Draw
from foredraft.verify_batch import Job

POS = 5  # of the first token after the root
DRAWS: list[Draw] = ["fixed", "iid", "distinct"]
Law = Callable[[tuple[int, ...]], Tensor]  # path of tokens -> law [vocab], float64


def random_law(vocab: int, seed: int, zeros: float = 0.2) -> Law:
    """Return a law that depends on the path in no simple way; some tokens have probability 0."""
    memo: dict[tuple[int, ...], Tensor] = {}

    def law(path: tuple[int, ...]) -> Tensor:
        if path not in memo:
            generator = torch.Generator().manual_seed(hash((seed, path)) % 2**63)
            weights = -torch.rand(vocab, dtype=torch.float64, generator=generator).log()
            weights[torch.rand(vocab, generator=generator) < zeros] = 0
            if weights.sum() == 0:
                weights[seed % vocab] = 1
            memo[path] = weights / weights.sum()
        return memo[path]

    return law


def path_tokens(tokens: Sequence[int], parents: Sequence[int], node: int) -> tuple[int, ...]:
    """Return the tokens from the first level down to a node."""
    return () if node < 0 else (*path_tokens(tokens, parents, parents[node]), tokens[node])


def rows_of(law: Law, tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
    """Return the laws after the root and after each node, [n + 1, vocab]."""
    return torch.stack([law(path_tokens(tokens, parents, node)) for node in range(-1, len(parents))])


@dataclass(frozen=True)
class Scene:
    """A shape of tree, how it is drawn, and the laws of both models."""

    parents: tuple[int, ...]
    draw: Draw
    target: Law
    draft: Law
    vocab: int

    @property
    def levels(self) -> int:
        """Depth of the tree."""
        return max(
            (len(path_tokens(self.parents, self.parents, n)) for n in range(len(self.parents))), default=0
        )

    def draft_of(self, tokens: Sequence[int]) -> Draft:
        """Return the draft with these tokens."""
        laws = None if self.draw == "fixed" else rows_of(self.draft, tokens, self.parents)
        return Draft(torch.tensor(tokens, dtype=torch.int64), self.parents, laws, self.draw)

    def rows(self, tokens: Sequence[int]) -> Tensor:
        """Return the target's laws at the root and at each node."""
        return rows_of(self.target, tokens, self.parents)

    def autoregressive(self, length: int, start: tuple[int, ...] = ()) -> dict[tuple[int, ...], float]:
        """Return the target's own law of the `length` tokens after `start`."""
        if length == 0:
            return {(): 1.0}
        return {
            (token, *rest): chance * after
            for token, chance in enumerate(self.target(start).tolist())
            for rest, after in self.autoregressive(length - 1, (*start, token)).items()
        }


def random_parents(count: int, generator: torch.Generator, most_children: int) -> tuple[int, ...]:
    """Return a random tree in which no node has more than `most_children` children."""
    parents: list[int] = []
    while len(parents) < count:
        parent = int(torch.randint(-1, len(parents), (1,), generator=generator)) if parents else -1
        if parents.count(parent) < most_children:
            parents.append(parent)
    return tuple(parents)


def drafts_of(scene: Scene) -> list[tuple[float, tuple[int, ...]]]:
    """Return every draft that can be drawn on the scene's tree, with its probability."""
    found: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    for node, parent in enumerate(scene.parents):
        longer = []
        for chance, tokens in found:
            law = scene.draft(path_tokens(tokens, scene.parents, parent)).clone()
            if scene.draw == "distinct":
                for other in range(node):
                    if scene.parents[other] == parent:
                        law[tokens[other]] = 0
                law /= law.sum()
            longer += [
                (chance * float(law[token]), (*tokens, token))
                for token in range(scene.vocab)
                if law[token] > 0
            ]
        found = longer
    return found


def random_job(seed: int, draw_as: Draw, vocab: int, *, sharp: float = 1.0, agree: float = 0.5) -> Job:
    """Return a tree of up to 12 nodes. `agree`: how often a node holds the target's likeliest token."""
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(13, (1,), generator=generator))
    parents = random_parents(count, generator, 4)
    logits = torch.randn(count + 1, vocab, generator=generator) * sharp
    likely = torch.rand(count, generator=generator) < agree
    random = torch.randint(vocab, (count,), generator=generator)
    tokens = torch.where(likely, logits.argmax(-1)[[parent + 1 for parent in parents]], random)
    near = logits + torch.randn(count + 1, vocab, generator=generator)
    laws = None if draw_as == "fixed" else torch.softmax(near, -1)
    return Job(Draft(tokens, parents, laws, draw_as), torch.softmax(logits, -1), Noise(seed), POS + seed % 7)


def one_hot(*tokens: int, vocab: int = 4) -> Tensor:
    """Return laws of one token each, [tokens, vocab]."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocab).float()
