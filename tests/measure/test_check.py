"""The check finds every planted fault, and nothing where there is none."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import BODIES, subject
from serving import command, mock

from foredraft.measure.check import Certificate, Plan, run_check
from foredraft.measure.greedy import compare, gap_noise
from foredraft.measure.laws import detectable, looks, spent, tree_test
from foredraft.measure.sampled import check_sampled, choose
from foredraft.measure.stated import Guess, Place, Stakes, place_of, stated_law
from foredraft.measure.subjects import Answered

REPEATS = int(os.environ.get("FOREDRAFT_CHECK_REPEATS", "1"))  # 100 by hand
NAMED = [(body["prompt"], body) for body in BODIES]
QUICK = Plan(sampled=0)


def checked(fault: str | None, plan: Plan, seed: int = 0) -> Certificate:
    plain, drafted = (
        subject("plain", drafts=False, seed=seed),
        subject("drafted", drafts=True, fault=fault, seed=seed),
    )
    return run_check(plain, drafted, NAMED, plan)


@pytest.mark.parametrize("seed", range(REPEATS))
def test_the_right_engine_passes(seed: int) -> None:
    found = checked(None, Plan(sampled=2, answers=200), seed=seed)
    assert found.passed, found.lines()
    assert {f.judged for f in found.greedy} == {"same"}
    outcomes = {f.parameter: f.outcome for f in found.parameters}
    assert outcomes["repetition_penalty"] in ("same", "not shown")
    assert all(
        outcomes[name] == "same" for name in ("top_k", "top_p", "min_p", "max_tokens", "logprobs", "usage")
    )


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        ("ignored penalty", "presence_penalty"),
        ("wrong bonus row", "greedy"),
        ("stop overrun", "stop"),
        ("zero logprobs", "logprobs"),
    ],
)
def test_planted_faults_are_found_and_named(fault: str, where: str) -> None:
    found = checked(fault, QUICK)
    assert not found.passed
    if where == "greedy":
        bad = [f for f in found.greedy if f.judged == "difference"]
        assert bad
        assert bad[0].at is not None
        return
    assert {f.judged for f in found.greedy} == {"same"}
    outcome = {f.parameter: f.outcome for f in found.parameters}[where]
    assert outcome == ("ignored" if where == "presence_penalty" else "difference")


@pytest.mark.parametrize("seed", range(1, 1 + REPEATS))
def test_an_acceptance_that_is_too_kind_is_found(seed: int) -> None:
    found = checked("three in a hundred", Plan(greedy=1, parameters=0, sampled=2, answers=400), seed)
    assert found.sampled is not None
    assert found.sampled.differs
    assert found.sampled.stated_pvalue < found.sampled.alpha / 2
    assert not found.passed
    assert "the distributions DIFFER" in "\n".join(found.lines())


def test_two_samples_alone_find_a_coarse_fault() -> None:
    plain, drafted = subject("plain", drafts=False), subject("drafted", drafts=True, fault="half")
    for one in (plain, drafted):
        one.states_laws = False  # as of servers
    found = check_sampled(plain, drafted, BODIES[:2], 200, 1e-3, lambda part: None)
    assert found.differs
    assert found.toward > 0
    assert not found.tokens


def sample(law: Any, count: int, seed: int, length: int = 3) -> list[tuple[int, ...]]:
    draws = np.random.default_rng(seed).choice(len(law), p=law, size=(count, length))
    return [tuple(row) for row in draws.tolist()]


def test_the_law_test_has_its_error_rate_and_finds_a_shift() -> None:
    law = [0.5, 0.3, 0.15, 0.05]
    pvalues = [tree_test([(sample(law, 400, s), sample(law, 400, 1000 + s))]).pvalue for s in range(200)]
    assert 0.01 < np.mean(np.array(pvalues) < 0.05) < 0.12  # a fair share of 200 at 5 %
    flat = [1 / 50] * 50  # nearly every beginning is seen once: of equals, neither side's may be favoured
    sparse = [tree_test([(sample(flat, 60, s), sample(flat, 60, 1000 + s))]).toward for s in range(200)]
    assert abs(np.mean(sparse)) < 0.3
    shifted = [0.44, 0.36, 0.15, 0.05]
    assert tree_test([(sample(law, 3000, 1), sample(shifted, 3000, 2))]).pvalue < 1e-3


def places(law: list[float], said: list[float], count: int, seed: int) -> list[Place]:
    """Tokens drawn from `said` where `law` is stated; the last but one token is always guessed."""
    draws = np.random.default_rng(seed).choice(len(said), p=said, size=count)
    stated = {token: share for token, share in enumerate(law[:-1])}
    return [place_of(stated, int(token), Guess((len(law) - 2,))) for token in draws]


def test_stakes_have_their_error_rate_and_grow_where_laws_are_not_kept() -> None:
    law = [0.5, 0.3, 0.1, 0.02, 0.08]
    pvalues = []
    for seed in range(300):
        stakes = Stakes()
        for part in range(4):
            stakes.add(places(law, law, 150, 4 * seed + part))
        pvalues.append(stakes.pvalue)
    assert np.mean(np.array(pvalues) <= 0.05) <= 0.05
    assert stakes.guesses == stakes.tokens == 600
    kind, strict = [0.485, 0.291, 0.097, 0.0494, 0.0776], [0.51, 0.306, 0.102, 0.0004, 0.0816]
    for said in (kind, strict, [0.6, 0.27, 0.05, 0.02, 0.06]):
        stakes = Stakes()
        stakes.add(places(law, said, 4000, 7))
        assert stakes.pvalue < 1e-4, said


def test_the_detectable_share_is_found_as_often_as_it_says() -> None:
    chance, found = 0.05, 0
    stakes = Stakes()
    stakes.add([Place((chance, 1 - chance), 1, (chance, chance))] * 1500)
    share = stakes.detectable(1e-3, 0.9)
    assert share is not None
    assert share < 0.05
    hits = np.random.default_rng(3).random((200, 1500)) < chance + share * (1 - chance)
    for row in hits:
        stakes = Stakes()
        stakes.add(Place((chance, 1 - chance), 1 - int(hit), (chance, chance), bool(hit)) for hit in row)
        found += stakes.pvalue <= 1e-3
    assert found >= 170
    assert Stakes().detectable(1e-3, 0.9) is None


def test_laws_are_read_from_what_is_stated() -> None:
    top = {token: math.log(share) for token, share in enumerate((0.4, 0.2, 0.2, 0.1))}
    assert stated_law(top, 1.0, 0) == pytest.approx({0: 0.4, 1: 0.2, 2: 0.2, 3: 0.1})
    assert stated_law(top, 0.5, 0) is None  # the rest would count too
    assert stated_law(top, 2.0, 2) is None  # the second ties with the third
    assert stated_law(top, 2.0, 4) is None  # the fifth might tie with the fourth
    assert stated_law(top, 0.5, 1) == {0: 1.0}
    assert stated_law(top, 0.5, 3) == pytest.approx({0: 16 / 24, 1: 4 / 24, 2: 4 / 24})
    law = stated_law(top, 1.0, 0)
    assert law is not None
    other = place_of(law, 9, None)
    assert (other.law, other.cell) == (pytest.approx((0.4, 0.2, 0.2, 0.1, 0.1)), 4)
    assert place_of(law, 1, Guess((1, 3))).guessed == pytest.approx((0.3, 0.3))
    assert place_of(law, 1, Guess((3, 8))).guessed == pytest.approx((0.1, 0.2))
    assert place_of(law, 1, Guess((1,), chance=0.8)).guessed == pytest.approx((0.25, 0.25))
    assert place_of(law, 1, Guess((1,), chance=0.1)).guessed == (1.0, 1.0)


def test_drawn_drafts_are_judged_by_their_own_chance() -> None:
    """A chain drawn from a flat law: kept with chance min(1, target / draft), else never said."""
    plain, drafted = subject("plain", drafts=False), subject("drafted", drafts=True, drawn=True)
    found = check_sampled(plain, drafted, BODIES[:1], 100, 1e-4, lambda part: None)
    assert not found.differs
    assert found.guesses > 500
    assert found.stated_pvalue > 1e-2


def test_prompts_that_show_most_are_chosen() -> None:
    plain, drafted = subject("plain", drafts=False), subject("drafted", drafts=True)
    assert choose(plain, drafted, BODIES, 1)[0] in BODIES
    sure = {"temperature": 1, "top_k": 1, "prompt": "abc", "max_tokens": 4}
    assert choose(plain, plain, [sure, *BODIES], 4) == [sure, *BODIES]


def test_looks_spend_no_more_than_the_error_rate() -> None:
    assert looks(1000) == [125, 250, 500, 1000]
    assert sum(spent(looks(1000), 1e-3)) == pytest.approx(1e-3)
    assert detectable(4000, 1e-3, 0.9) == pytest.approx(detectable(1000, 1e-3, 0.9) / 2)


def test_a_difference_within_the_noise_is_a_tie() -> None:
    tops = ({1: -0.70, 2: -0.71}, {1: -0.1, 2: -3.0})
    base, other = Answered(tokens=(1, 1), tops=tops), Answered(tokens=(2, 1), tops=tops)
    assert compare("x", base, other, noise=0.02).judged == "tie"
    assert compare("x", base, other, noise=0.001).judged == "difference"
    assert compare("x", base, Answered(tokens=(1, 2), tops=tops), noise=0.02).judged == "difference"
    moved = Answered(tokens=(1, 1), tops=({1: -0.69, 2: -0.715}, {1: -0.1, 2: -3.0}))
    assert gap_noise([[base], [moved]]) == pytest.approx(0.015)
    untold = Answered(base.text, tops=tops[:1])  # the same text, without what makes it up
    assert gap_noise([[base], [moved], [untold]]) == pytest.approx(0.015)


class Said:
    """Says one token after another, the first of two that are nearly as likely; alone and together it finds
    them differently near, if it is coarse.
    """

    tops, states_laws = 5, False

    def __init__(self, name: str, first: int, *, coarse: bool) -> None:
        self.name, self.first, self.coarse = name, first, coarse

    def ask(self, bodies: Any, *, together: bool) -> list[Answered]:
        gap = 0.02 if together and self.coarse else 0.005
        tops = ({1: -0.7, 2: -0.7 - gap}, *({3: -0.1, 4: -3.0} for _ in range(11)))
        return [self._one(body["max_tokens"], tops) for body in bodies]

    def _one(self, most: int, tops: Any) -> Answered:
        tokens = (self.first, *[3] * 11)[:most]
        logprobs = tuple(top[token] for top, token in zip(tops, tokens, strict=False))
        text = "".join(map(str, tokens))
        return Answered(text, tokens, logprobs, tops[:most], "length", len(tokens))

    def token_id(self, token: Any) -> int | None:
        return None


@pytest.mark.parametrize(
    ("coarse", "fine", "code"), [(1, 1, 0), (2, 1, 0), (2, 2, 1)], ids=["no tie", "tie", "difference"]
)
def test_ties_are_decided_in_float32(
    coarse: int, fine: int, code: int, monkeypatch: Any, tmp_path: Path, capsys: Any
) -> None:
    opened = []

    @contextmanager
    def subjects(answering: Any, asks: Any) -> Iterator[list[Said]]:
        opened.append(answering.dtype)
        rough = answering.dtype != "float32"
        yield [Said("none", 1, coarse=rough), Said("ngram", coarse if rough else fine, coarse=rough)]

    monkeypatch.setattr(import_module("foredraft.cli.check"), "_subjects", subjects)
    out = tmp_path / "certificate.json"
    asked = ["--limit", "1", "--max-tokens", "12", "--answers", "0", "--dtype", "bfloat16"]
    assert command("check", *asked, "--out", str(out)) == code
    (certificate,) = json.loads(out.read_text())["certificates"]
    assert {one["judged"] for one in certificate["greedy"]} == ({"tie"} if coarse == 2 else {"same"})
    assert opened == (["bfloat16", "float32"] if coarse == 2 else ["bfloat16"])
    judged = {one["judged"] for one in certificate["float32"]}
    assert judged == (set() if coarse == 1 else {"same"} if fine == 1 else {"difference"})
    assert ("in float32:" in capsys.readouterr().out) == (coarse == 2)


def interrupt(*_: Any) -> Any:
    raise KeyboardInterrupt


def test_servers_are_checked_and_a_certificate_is_written(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    truth = {"ttft_s": 0.0, "inter_token_s": 0.0}
    out = tmp_path / "certificate.json"
    with mock(**truth) as base, mock(**truth) as same, mock(**truth, salt="x") as other:
        common = ["check", "--baseline", base, "--limit", "2", "--max-tokens", "12", "--answers", "0"]
        command(*common, "--variant", f"same={same}", "--out", str(out))
        shown = capsys.readouterr().out
        assert "greedy: 4 comparisons, 4 same, 0 tie, 0 difference" in shown
        assert json.loads(out.read_text())["certificates"][0]["variant"] == "same"
        assert command(*common, "--variant", f"other={other}") == 1
        assert "IT DIFFERS" in capsys.readouterr().out
    with mock(**truth) as base, monkeypatch.context() as patch:
        patch.setattr("foredraft.measure.check.run_check", interrupt)
        assert command("check", "--baseline", base, "--variant", f"same={base}") == 130
    capsys.readouterr()
    assert command("check", "--draft", "none", "--alpha", "2") == 2
    assert "--alpha between 0 and 0.5" in capsys.readouterr().err
