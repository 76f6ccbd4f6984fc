"""The demo on a tiny model: what counts as identical, the mean, and what is printed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from foredraft import LLM, Completion, SamplingParams, SpecStats, demo
from foredraft.cli import main
from foredraft.cli.options import Loading
from foredraft.demo import Comparison, DemoPrompt, Pair, compare, demo_prompts, mean_speedup, run_demo
from foredraft.measure import greedy
from foredraft.text import encode_chat
from tiny_tokenizers import build_chat_model

PROMPTS = [DemoPrompt("chat", "the cat"), DemoPrompt("code", "the mat"), DemoPrompt("code", "END end.")]
CATEGORIES = ["chat", "code", "code edit", "summary", "extraction", "maths"]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(build_chat_model(tmp_path_factory.mktemp("tiny")), draft="ngram", prefix_cache=False)


@pytest.fixture(scope="module")
def prompt(llm: LLM) -> list[int]:
    return encode_chat(llm.tokenizer, [{"role": "user", "content": PROMPTS[0].text}])


@pytest.fixture(scope="module")
def answer(llm: LLM, prompt: list[int]) -> list[int]:
    return llm.generate([prompt], GREEDY)[0].token_ids


def pair(plain: float, drafted: float, identical: Any = "yes") -> Pair:
    """A pair of 60-token answers at these tokens per second."""
    plain_answer, drafted_answer = (
        Completion("", [], "length", None, SpecStats(steps=60, emitted=60, total_s=60 / speed))
        for speed in (plain, drafted)
    )
    return Pair(PROMPTS[0], plain_answer, drafted_answer, Comparison(identical))


def test_there_are_two_prompts_of_each_category() -> None:
    prompts = demo_prompts()
    assert sorted(entry.category for entry in prompts) == sorted(CATEGORIES * 2)
    assert len({entry.text for entry in prompts}) == 12


def test_in_float32_all_answers_are_identical(llm: LLM) -> None:
    seen: list[Pair] = []
    pairs = run_demo(llm, PROMPTS, GREEDY, seen.append)
    assert seen == pairs
    assert [entry.comparison.identical for entry in pairs] == ["yes"] * 3
    assert all(entry.plain.stats.drafted == 0 for entry in pairs)
    assert sum(entry.drafted.stats.drafted for entry in pairs) > 0
    assert all(entry.speedup > 0 for entry in pairs)


def with_other_token(llm: LLM, prompt: list[int], answer: list[int], at: int, rank: int) -> list[int]:
    """The answer with the token at one place replaced by the target's choice of this rank."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20, budget=0)
    logprobs = llm.generate([prompt + answer[:at]], params)[0].logprobs
    assert logprobs is not None
    return [*answer[:at], logprobs[0].top[rank][0], *answer[at + 1 :]]


@pytest.mark.parametrize("at", [0, 1, 17, 39])
def test_another_token_is_no_tie(llm: LLM, prompt: list[int], answer: list[int], at: int) -> None:
    found = compare(llm, prompt, answer, with_other_token(llm, prompt, answer, at, rank=1))
    assert (found.identical, found.at) == ("NO", at)
    assert found.gap is not None
    assert found.noise is not None
    assert 0 <= found.noise < 1e-3 < found.gap
    assert f"differs at token {at}: the two tokens are" in found.why


def test_within_the_noise_it_is_a_tie(
    llm: LLM, prompt: list[int], answer: list[int], monkeypatch: Any
) -> None:
    other = with_other_token(llm, prompt, answer, 9, rank=1)
    gap = compare(llm, prompt, answer, other).gap
    assert gap is not None
    monkeypatch.setattr(demo, "_noise", lambda *_: gap)
    assert compare(llm, prompt, answer, other).identical == "tie"
    monkeypatch.setattr(demo, "_noise", lambda *_: gap * 0.99)
    assert compare(llm, prompt, answer, other).identical == "NO"


def test_an_unlikely_token_or_an_early_end_is_no_tie(
    llm: LLM, prompt: list[int], answer: list[int], monkeypatch: Any
) -> None:
    monkeypatch.setattr(demo, "_noise", lambda *_: 1e9)
    likely = {with_other_token(llm, prompt, answer, 5, rank)[5] for rank in range(20)}
    unlikely = min(set(range(len(llm.tokenizer))) - likely)
    found = compare(llm, prompt, answer, [*answer[:5], unlikely, *answer[6:]])
    assert (found.identical, found.gap) == ("NO", None)
    assert "not among the likeliest" in found.why
    assert compare(llm, prompt, answer, answer[:7]) == Comparison("NO", 7)
    assert compare(llm, prompt, answer[:7], answer) == Comparison("NO", 7)


def test_plain_decoding_that_does_not_repeat_is_no_tie(
    llm: LLM, prompt: list[int], answer: list[int]
) -> None:
    claimed = with_other_token(llm, prompt, answer, 5, rank=1)
    found = compare(llm, prompt, claimed, answer)
    assert found == Comparison("NO", 5)
    assert "does not repeat" in found.why


def test_the_mean_is_geometric_and_its_interval_repeats() -> None:
    same = mean_speedup([pair(20, 30)] * 5)
    assert (same.mean, same.low, same.high) == pytest.approx((1.5, 1.5, 1.5))
    mixed = [pair(20, 40), pair(40, 20), pair(10, 20), pair(20, 20)]
    found = mean_speedup(mixed)
    assert found.mean == pytest.approx(2**0.25)
    assert found.low < found.mean < found.high
    assert mean_speedup(mixed) == found


@pytest.fixture
def short_demo(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loading, "load", lambda self, **options: llm)
    monkeypatch.setattr(demo, "demo_prompts", lambda: PROMPTS)


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(["demo", "--max-tokens", "8", *args])
    return int(exit_.value.code or 0)


@pytest.mark.usefixtures("short_demo")
def test_the_table_shows_every_prompt_and_the_mean(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run() == 0
    shown = capsys.readouterr().out
    assert "smollm2-135m, float32, draft ngram" in shown
    for column in ("category", "tokens", "plain", "drafted", "speed-up", "accept_", "emitted", "identical"):
        assert column in shown
    assert "…" not in shown
    assert shown.count("yes") == 3
    assert "mean speed-up" in shown
    assert "95 % bootstrap interval" in shown


@pytest.mark.usefixtures("short_demo")
def test_the_record_holds_every_token(capsys: Any) -> None:
    assert run("--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["model"] == "smollm2-135m"
    assert record["max_tokens"] == 8
    assert [entry["category"] for entry in record["pairs"]] == [entry.category for entry in PROMPTS]
    for entry in record["pairs"]:
        assert entry["comparison"]["identical"] == "yes"
        assert entry["plain"]["token_ids"] == entry["drafted"]["token_ids"]
        speeds = [entry[way]["stats"]["tokens_per_s"] for way in ("plain", "drafted")]
        assert entry["speedup"] == pytest.approx(speeds[1] / speeds[0])
    assert set(record["mean_speedup"]) == {"mean", "low", "high"}


@pytest.mark.usefixtures("short_demo")
@pytest.mark.parametrize(("identical", "code"), [("NO", 1), ("tie", 0)])
def test_a_wrong_answer_exits_with_1(identical: Any, code: int, capsys: Any, monkeypatch: Any) -> None:
    def found(llm: LLM, prompt: Sequence[int], *_: Any) -> Comparison:
        return Comparison(identical, 3, 0.25, 0.125)

    monkeypatch.setattr(demo, "compare", found)
    assert run() == code
    line = f"{identical}: prompt 1 differs at token 3: the two tokens are 0.25 nats apart"
    assert line in capsys.readouterr().out.replace("\n", " ")


def test_ties_are_told_from_differences_as_the_check_does() -> None:
    assert demo._NOISE_FLOOR == greedy.NOISE_FLOOR


def test_the_prompts_are_in_the_package() -> None:
    assert (Path(demo.__file__).parent / "demo_prompts.json").exists()
