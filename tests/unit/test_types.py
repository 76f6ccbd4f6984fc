"""What SamplingParams refuses and how it says so; the small values' own arithmetic."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from foredraft.errors import ConfigError, ForedraftError
from foredraft.types import MAX_SEED, NO_DRAFT, Draft, SamplingParams, SpecStats, chain

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature=-0.1 is out of range: use 0 (greedy) to 100"),
    ({"temperature": 101}, "temperature=101"),
    ({"temperature": float("nan")}, "temperature=nan is out of range: use a finite number"),
    ({"temperature": "1"}, "temperature='1'"),
    ({"top_k": -1}, "top_k=-1 is out of range: use 0 (off) or more"),
    ({"top_k": 2.0}, "top_k=2.0 is out of range: use a whole number"),
    ({"top_k": True}, "top_k=True"),
    ({"top_p": 0}, "top_p=0 is out of range: use more than 0, up to 1 (off)"),
    ({"top_p": 1.01}, "top_p=1.01"),
    ({"min_p": -0.01}, "min_p=-0.01 is out of range: use 0 (off) to 1"),
    ({"min_p": 1.5}, "min_p=1.5"),
    ({"repetition_penalty": 0}, "repetition_penalty=0 is out of range: use 0.01 to 100; 1 is off"),
    ({"repetition_penalty": float("inf")}, "repetition_penalty=inf"),
    ({"presence_penalty": 2.1}, "presence_penalty=2.1 is out of range: use -2 to 2; 0 is off"),
    ({"frequency_penalty": -3}, "frequency_penalty=-3"),
    ({"max_tokens": 0}, "max_tokens=0 is out of range: use 1 or more"),
    ({"min_tokens": -1}, "min_tokens=-1"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens=5 contradicts max_tokens=4: raise max_tokens"),
    ({"seed": -1}, f"seed=-1 is out of range: use a whole number from 0 to {MAX_SEED}, or None"),
    ({"seed": MAX_SEED + 1}, "seed="),
    ({"seed": 1.0}, "seed=1.0"),
    ({"logprobs": 21}, "logprobs=21 is out of range: use 0 to 20, or None"),
    ({"budget": 257}, "budget=257 is out of range: use 0 (off) to 256, or 'auto'"),
    ({"budget": "fast"}, "budget='fast'"),
    ({"budget": True}, "budget=True"),
    ({"stop": ("a", "")}, "stop='' is out of range: use non-empty strings"),
    ({"stop": (3,)}, "stop=3"),
    ({"stop": None}, "stop=None is out of range: use a list of them, () for none"),
    ({"stop_token_ids": 2}, "stop_token_ids=2 is out of range: use a list of them"),
    ({"logit_bias": [7]}, "logit_bias=[7] is out of range: use {token id: bias}"),
    ({"stop_token_ids": (1, -1)}, "stop_token_ids=-1 is out of range: use token ids, 0 or more"),
    ({"logit_bias": {"7": 1.0}}, "logit_bias='7' is out of range: use token ids, 0 or more, as keys"),
    ({"logit_bias": {7: 101}}, "logit_bias[7]=101 is out of range: use -100 to 100"),
    ({"logit_bias": {7: float("nan")}}, "logit_bias[7]=nan"),
    ({"ignore_eos": 1}, "ignore_eos=1 is out of range: use True or False"),
    ({"reproducible": None}, "reproducible=None"),
    ({"reproducible": np.True_}, "reproducible=np.True_"),
    ({"top_k": np.float32(2)}, "top_k=np.float32(2.0) is out of range: use a whole number"),
    ({"temperature": np.float32("nan")}, "temperature=np.float32(nan)"),
    ({"temperature": 10**400}, "temperature=1000"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_bad_parameters_are_refused_in_one_clear_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        SamplingParams(**options)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)
    assert isinstance(refused.value, ValueError)
    assert isinstance(refused.value, ForedraftError)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 100},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"min_p": 1},
        {"seed": 0},
        {"seed": MAX_SEED},
        {"logprobs": 0},
        {"logprobs": 20},
        {"budget": 0},
        {"budget": 256},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"min_tokens": 5, "max_tokens": 5},
        {"logit_bias": {0: -100, 5: 100.0}},
    ],
    ids=str,
)
def test_limits_themselves_are_allowed(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    assert all(getattr(params, name) == value for name, value in options.items())


def test_what_is_given_is_kept_apart_from_the_callers_own() -> None:
    bias, ids = {3: 1.0}, [4, 5]
    params = SamplingParams(logit_bias=bias, stop="end", stop_token_ids=ids)  # type: ignore[arg-type]
    bias[9], ids[0] = 2.0, 6
    assert params.logit_bias == {3: 1.0}
    assert params.stop_token_ids == (4, 5)
    assert params.stop == ("end",)
    assert hash(params) == hash(SamplingParams(logit_bias={3: 1.0}, stop="end", stop_token_ids=(4, 5)))  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]


def test_numpys_numbers_are_numbers() -> None:
    given: Any = {
        "temperature": np.float32(0.5),
        "top_k": np.int64(5),
        "seed": np.uint8(7),
        "budget": np.int8(2),
    }
    params = SamplingParams(**given, stop_token_ids=np.array([3]), logit_bias={np.int64(4): np.float16(0.5)})
    assert params == SamplingParams(0.5, 5, seed=7, budget=2, stop_token_ids=(3,), logit_bias={4: 0.5})
    assert [type(getattr(params, name)) for name in given] == [float, int, int, int]


def test_greedy_means_temperature_zero() -> None:
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=0.0).greedy
    assert not SamplingParams(temperature=1e-6).greedy


def test_drafts_know_their_shape() -> None:
    draft = chain([4, 5, 6])
    assert draft.parents == (-1, 0, 1)
    assert len(draft) == 3
    assert len(NO_DRAFT) == 0
    assert Draft([4, 5], (-1, 0)).tokens.tolist() == [4, 5]  # type: ignore[arg-type]
    assert chain(torch.tensor([4])).tokens.dtype == torch.int64


@pytest.mark.parametrize(
    ("tokens", "parents", "draw"),
    [
        ([1, 2], (-1,), "fixed"),
        ([1, 2], (-1, 1), "fixed"),
        ([1], (-2,), "fixed"),
        ([1], (-1,), "iid"),
        ([1], (-1,), "drawn"),
    ],
)
def test_broken_drafts_are_caught(tokens: list[int], parents: tuple[int, ...], draw: Any) -> None:
    with pytest.raises(ValueError, match=r"parents|laws|draw='drawn' is unknown"):
        Draft(torch.tensor(tokens), parents, None, draw)


def test_stats_are_the_sum_of_their_steps() -> None:
    stats = SpecStats(steps=1, drafted=6, levels=3, accepted=2, emitted=3, total_s=0.5)
    stats.note_path(2)
    other = SpecStats(steps=1, drafted=1, levels=1, accepted=1, emitted=2, total_s=0.5)
    other.note_path(1)
    stats.add(other)
    assert stats.accepted_at == [2, 1]
    assert other.accepted_at == [1]
    assert (stats.steps, stats.drafted, stats.levels, stats.accepted, stats.emitted) == (2, 7, 4, 3, 5)
    assert stats.accept_rate == 3 / 4
    assert stats.mean_emitted == 5 / 2
    assert stats.conditional_at == [1.0, 0.5]
    assert stats.copy() == stats
    assert stats.copy().accepted_at is not stats.accepted_at
    assert stats.tokens_per_s == 5.0


def test_stats_of_nothing_are_zero() -> None:
    stats = SpecStats()
    stats.note_path(0)
    assert (stats.accept_rate, stats.mean_emitted, stats.tokens_per_s, stats.accepted_at) == (0, 0, 0, [])
