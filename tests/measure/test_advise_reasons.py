"""Reasons of predictions: which apply, with which numbers, and what to do."""

from __future__ import annotations

import pytest
import timed

from foredraft.measure.advise import Method, Traffic, predict
from foredraft.measure.reasons import AtLoad, of_draft, of_memory, of_requests


def test_bounds_are_where_they_are_said_to_be() -> None:
    assert of_draft("x", [AtLoad("1", 0.4, 1.5, 3), AtLoad("4", 0.3, 1.1, 2)]) == []
    assert of_draft("x", [AtLoad("1", 0.7, 1.5, 3)]) == []
    assert of_requests([24], 1.2, -1.5) == []
    assert [line.partition(",")[0] for line in of_requests([20, 23, 90], 1.3, -1.6)] == [
        "half of the answers have less than 24 tokens (median 23)",
        "temperature 1.3",
        "the text is hard to predict",
    ]


@pytest.mark.parametrize(
    ("found", "what"),
    [
        ([AtLoad("2", 0.8, 1.5, 6)], "draft 6 a step at load 2"),
        ([AtLoad("1", 0.8, 1.5, 3, deepest=True)], "draft 3 a step at load 1, and try more"),
        ([AtLoad("1", 0.8, 1.5, None)], "try larger budgets while few requests run"),
        ([AtLoad("1", 0.8, 1.01, 0)], "but no budget pays at load 1, leave it off there"),
    ],
)
def test_what_to_do_with_a_good_draft(found: list[AtLoad], what: str) -> None:
    assert of_draft("x", found) == [f"x: up to 80% accepted, over 70%, a good draft for this: {what}"]


def test_the_load_from_which_it_does_not_pay() -> None:
    found = [AtLoad(str(load), 0.5, speedup, 1) for load, speedup in ((16, 0.8), (1, 1.5), (4, 1.2))]
    assert of_draft("x", found) == ["x: pays below about 10 requests at once: leave it off above"]
    assert of_draft("x", found[:1]) == ["x: does not pay at load 16 (0.80x): leave it off"]
    assert of_draft("x", [AtLoad("0.5/s", 0.5, 0.8, 0)]) == []


def test_memory_is_of_weights_and_of_the_cache_at_each_load() -> None:
    assert of_memory("eagle+suffix", 26_950_000, 768, 300, [1, 16]) == (
        "eagle+suffix: takes 26.9 MB for weights and 768 bytes of KV cache a token, with 300 tokens a "
        "request up to 0.2 MB at load 1 and 3.7 MB at load 16: keep that free, or use ngram, with neither"
    )
    assert "takes 3.0 MB for weights and no KV cache: keep" in of_memory("medusa", 3_000_000, 0, 300, [1])


def test_predictions_come_with_reasons() -> None:
    clock, texts = timed.Clock(), timed.traffic(2)
    model = timed.methods(clock)["model"]
    heavy = Method(model.name, model.make, model.controller, model.longest, bytes=5_000_000, kv_bytes=100)
    advice = predict(timed.TimedTarget(clock), [heavy], Traffic(texts, 1.5, -2.0), [2, 1], clock=clock)
    longest = max(len(one.prompt) + len(one.answer) for one in texts)
    assert of_memory("model", 5_000_000, 100, longest, [1, 2]) in advice.reasons
    rate, even = max(one.accept_rate for one in advice.predictions), advice.break_even("model")
    assert (even is not None) == any("pay" in line for line in advice.reasons)
    assert any(f"{rate:.0%} accepted" in line for line in advice.reasons) == (not 0.4 <= rate <= 0.7)
    assert advice.reasons[-3:] == tuple(of_requests([len(one.answer) for one in texts], 1.5, -2.0))
