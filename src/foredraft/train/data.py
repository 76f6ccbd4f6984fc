"""Batches of collected answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foredraft.train.collect import Answer

_POOL = 16  # batches whose answers are sorted by length together


@dataclass(frozen=True, slots=True)
class Batch:
    """Answers side by side, padded at the end.

    ids: int64 [answers, tokens + 1], prompt and answer; states: bfloat16 [answers, tokens, width], the hidden
    states of all but the last. rows: how many states are real, prompts: how many tokens are the prompt's,
    int64 [answers] each.
    """

    ids: Tensor
    states: Tensor
    rows: Tensor
    prompts: Tensor

    def to(self, device: torch.device) -> Batch:
        """Return this batch on a device."""
        parts = (self.ids, self.states, self.rows, self.prompts)
        return Batch(*(part.to(device, non_blocking=True) for part in parts))

    def part(self, answer: int) -> Batch:
        """Return one of its answers, a batch of its own."""
        rows = int(self.rows[answer])
        chosen = slice(answer, answer + 1)
        states = self.states[chosen, :rows]
        return Batch(self.ids[chosen, : rows + 1], states, self.rows[chosen], self.prompts[chosen])

    def with_states(self, states: Tensor) -> Batch:
        """Return it with other states, [answers, tokens, width]."""
        return replace(self, states=states)

    def places(self) -> tuple[Tensor, Tensor]:
        """Return the (answer, row) of all real rows from the last of the prompt on, but not the first of
        all, int64 [n] each.
        """
        place = torch.arange(self.states.shape[1], device=self.rows.device)
        real = (place >= (self.prompts[:, None] - 1).clamp(min=1)) & (place < self.rows[:, None])
        answer, row = real.nonzero(as_tuple=True)
        return answer, row

    def logits(self, answer: Tensor, row: Tensor, lm_head: Tensor) -> Tensor:
        """Return the target's logits at some (answer, row), float32 [n, draft vocab].

        lm_head: [draft vocab, hidden], rows of the target's; the last layer's states come last in `states`.
        """
        last = self.states[answer, row, -lm_head.shape[1] :].float()
        return torch.nn.functional.linear(last, lm_head).float()


def mean(values: Tensor) -> Tensor:
    """Return the mean of values [n], 0 if there is none: short answers leave the last guesses unjudged."""
    return values.sum() / max(len(values), 1)


def split(answers: Sequence[Answer], share: float) -> tuple[list[Answer], list[Answer]]:
    """Return what to train on and what to hold out, by the keys, so that it stays when answers are added."""
    held = [int(answer.key, 16) % 10_000 < share * 10_000 for answer in answers]
    train = [answer for answer, out in zip(answers, held, strict=True) if not out]
    return train, [answer for answer, out in zip(answers, held, strict=True) if out]


def batches(answers: Sequence[Answer], tokens: int, seed: int) -> list[list[Answer]]:
    """Return all answers once, in an order given by `seed`, about `tokens` answer tokens a batch.

    Answers of like length share a batch.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(answers), generator=generator).tolist()
    usable = [answers[place] for place in order if len(answers[place].token_ids) > 1]
    found: list[list[Answer]] = []
    for pool in _filled(usable, tokens * _POOL):
        made = list(_filled(sorted(pool, key=lambda answer: answer.rows), tokens))
        found += [made[place] for place in torch.randperm(len(made), generator=generator).tolist()]
    return found


def stack(answers: Sequence[Answer], states: Tensor) -> Batch:
    """Return one batch of these answers."""
    longest = max(answer.rows for answer in answers)
    ids = torch.zeros(len(answers), longest + 1, dtype=torch.int64)
    padded = states.new_zeros(len(answers), longest, states.shape[1])
    for place, answer in enumerate(answers):
        ids[place, : answer.rows + 1] = torch.tensor(answer.ids)
        padded[place, : answer.rows] = states[answer.first_row : answer.first_row + answer.rows]
    rows = torch.tensor([answer.rows for answer in answers])
    return Batch(ids, padded, rows, torch.tensor([len(answer.prompt_ids) for answer in answers]))


def _filled(answers: Sequence[Answer], tokens: int) -> Iterator[list[Answer]]:
    some: list[Answer] = []
    left = tokens
    for answer in answers:
        some.append(answer)
        left -= len(answer.token_ids)
        if left <= 0:
            yield some
            some, left = [], tokens
    if some:
        yield some
