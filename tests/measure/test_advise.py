"""Advice: replay counts what a run counts, and predictions meet measurements where the truth is set."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timed
from serving import command

from foredraft.control import FixedBudget
from foredraft.engine.drafter import Drafter
from foredraft.errors import ConfigError
from foredraft.llm import LLM
from foredraft.measure.advise import Traffic, predict
from foredraft.measure.costs import DraftCosts, LoadCosts
from foredraft.measure.engine_arm import open_bench
from foredraft.measure.from_record import estimates, reasons
from foredraft.measure.methods import method_of
from foredraft.measure.reasons import break_even
from foredraft.measure.recipes import method_called, recipes
from foredraft.measure.records import Acceptance, ArmInfo, Header, Record, Result
from foredraft.measure.replay import Known, replay, sources_of
from foredraft.measure.simulate import simulate
from foredraft.measure.workload import Ask, parse_loads
from foredraft.types import SamplingParams
from tiny_tokenizers import build_chat_model


def answer(proposer: Any, one: Known, budget: int) -> Any:
    engine = timed.engine(timed.TimedTarget(timed.Clock()), 1, None, None, timed.Clock())
    engine.drafter = Drafter(proposer, FixedBudget(budget))
    engine.add(one.prompt, SamplingParams(temperature=0, max_tokens=len(one.answer)))
    ids: list[int] = []
    while engine.has_work:
        for output in engine.step():
            ids += output.token_ids
    return ids, output.stats


@pytest.mark.parametrize("kind", ["ngram", "medusa", "model"])
@pytest.mark.parametrize("budget", [1, 4])
def test_replay_and_simulation_count_what_a_run_counts(kind: str, budget: int) -> None:
    method, texts = timed.methods(timed.Clock())[kind], timed.traffic(3)
    target = timed.TimedTarget(timed.Clock())
    profiles = replay(method.make(4096), target, texts, timed.LONGEST)
    assert target.forwards == 0 or kind == "medusa"  # only drafts that want hidden states make it run
    costs = LoadCosts(1, {1: 1.0}, {1: 1.0})
    free = {source.method if source is not None else "": {0: 0.0} for source in sources_of(profiles)}
    for one, profile in zip(texts, profiles, strict=True):
        ids, true = answer(method.make(4096), one, budget)
        assert tuple(ids) == one.answer
        found = simulate([profile], costs, DraftCosts(free), FixedBudget(budget)).stats
        for name in ("steps", "drafted", "levels", "accepted", "emitted", "accepted_at"):
            total = getattr(found, name)
            twice = [2 * n for n in getattr(true, name)] if name == "accepted_at" else 2 * getattr(true, name)
            assert total == twice, name  # a load of 1 is two requests at least


@pytest.mark.parametrize("kind", ["ngram", "medusa", "eagle", "model"])
def test_predictions_are_near_measurements(kind: str) -> None:
    clock, texts = timed.Clock(), timed.traffic(8)
    method = timed.methods(clock)[kind]
    advice = predict(timed.TimedTarget(clock), [method], Traffic(texts, 0.0, -0.5), [1, 4, 16], clock=clock)
    for load in (1, 4, 16):
        said = [advice.of(kind, load), advice.auto(kind, load)]
        found = timed.measured(texts, load, method, [one.budget for one in said], clock)
        assert [one.speedup for one in said] == pytest.approx(found, rel=0.05)
    assert advice.best(1).speedup > 1.2


def test_break_even_is_where_the_line_meets_one() -> None:
    assert break_even([(1, 1.5), (4, 1.2), (16, 0.8)]) == pytest.approx(10)
    assert break_even([(16, 0.8), (1, 1.5), (4, 1.2)]) == pytest.approx(10)
    assert break_even([(1, 0.9)]) == 1
    assert break_even([(1, 1.5), (4, 1.2)]) is None


def test_costs_are_drawn_in_lines() -> None:
    costs = LoadCosts(1, {1: 1.0, 3: 2.0}, {1: 1.0, 10: 1.0, 20: 3.0})
    assert costs.step_s(2) == 1.5
    assert costs.step_s(5) == 3.0
    assert costs.step_s(3, 7) == 2.0
    assert costs.step_s(1, 29) == 5.0


def test_recipes_are_what_engines_take() -> None:
    for name in ("ngram", "suffix", "eagle", "medusa", "some-model"):
        lines = recipes(name, 4, 12)
        start = lines[1].index("{")
        config = json.loads(lines[1][start:-1])
        assert config["num_speculative_tokens"] == 4
        assert config["num_speculative_tokens_per_batch_size"] == [[1, 12, 4], [13, 4096, 0]]
    assert recipes("ngram", 0) == ["leave drafting off: foredraft serve --draft none"]
    both = recipes("eagle+suffix", 4)
    assert both[0].startswith("foredraft serve --draft eagle+suffix ")
    assert both[1:] == recipes("eagle", 4)[1:]
    assert recipes(None, 4, 12) == ["draft 4 tokens a step, and nothing above 12 requests at once"]
    assert recipes(None, 0) == ["leave drafting off"]


def test_methods_are_known_by_the_names_of_arms() -> None:
    assert method_called("ngram:5") == "ngram"
    assert method_called("eagle+suffix") == "eagle+suffix"
    assert method_called("fast") is None


def record(
    speedups: dict[str, float],
    drafted: int = 40,
    levels: int = 40,
    accepted_at: tuple[int, ...] = (9, 7, 4, 1),
    command: str = "c",
) -> Record:
    """A server that drafts 4 a step, half of it accepted, and is so much faster at each load."""
    arms = tuple(ArmInfo(name, "server", "m", "", "", "usage") for name in ("base", "fast"))
    header = Header(command, "t", {}, {}, arms, tuple(speedups), 1, 0, 31)
    results = []
    for load, speedup in speedups.items():
        emitted = 10 + sum(accepted_at)
        told = Acceptance("counters", 10, drafted, levels, sum(accepted_at), emitted, accepted_at)
        times = {"base": 3.1, "fast": 0.1 + 3 / speedup}
        base, fast = (Result("a", "all", arm, load, 0, 0.0, s, 0.1, emitted) for arm, s in times.items())
        results += [base, replace(fast, acceptance=told)]
    return Record(header, results)


def test_a_record_alone_gives_costs_and_a_budget() -> None:
    one, four = estimates(record({"1": 2.0, "4": 0.8}))
    assert one.drafted == 4
    assert one.node_cost == pytest.approx((3.1 / 2 - 1) / 4)
    assert one.best_budget == 3
    assert one.best_speedup == pytest.approx((1 + 0.9 + 0.7 + 0.4) / (1 + 3 * one.node_cost))
    assert four.best_speedup < 1.2
    with pytest.raises(ConfigError, match="no variant"):
        estimates(Record(record({"1": 2.0}).header))


@pytest.mark.parametrize(("drafted", "levels"), [(25, 25), (80, 40)])
def test_of_trees_and_of_drafts_now_and_then_only_what_was_measured_is_told(
    drafted: int, levels: int
) -> None:
    (one,) = estimates(record({"1": 2.0}, drafted, levels))
    assert one.best_budget is None
    assert one.best_speedup == pytest.approx(2.0)


def test_a_record_gives_the_reasons_that_it_tells() -> None:
    def told(one: Record) -> list[str]:
        return reasons(one, estimates(one))

    assert told(record({"1": 2.0, "4": 1.2})) == []
    assert told(record({"4": 0.8, "1": 2.0})) == [
        "fast: pays below about 3 requests at once: leave it off above"
    ]
    bad = record({"1": 0.9}, accepted_at=(4, 2, 1, 0), command="foredraft measure --temperature=1.5 --load 1")
    assert told(bad) == [
        "fast: at most 18% accepted, under 40%, a bad draft for this: take another, or train one on such "
        "requests",
        "fast: does not pay at load 1 (0.90x): leave it off",
        "half of the answers have less than 24 tokens (median 17), and drafting speeds up no prompts: begin "
        "with these (prefix cache)",
        "temperature 1.5, over 1.2, is hot, and more guesses are rejected than greedily: lower it, or "
        "measure small budgets at it",
    ]
    good = {"accepted_at": (10, 9, 9, 9)}
    start = "fast: up to 92% accepted, over 70%, a good draft for this: "
    assert told(record({"1": 2.0}, **good)) == [start + "draft 4 a step at load 1, and try more"]
    trees = record({"1": 2.0, "0.5/s": 0.8}, drafted=80, **good)
    assert told(trees) == [start + "try larger budgets while few requests run"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_chat_model(tmp_path_factory.mktemp("tiny"))


def test_engines_from_end_to_end(model: Path, tmp_path: Path, capsys: Any) -> None:
    requests, out = tmp_path / "requests.jsonl", tmp_path / "measure.jsonl"
    said = ("the cat sat", "the mat", "naïve")
    lines = [{"messages": [{"role": "user", "content": text}], "ignore_eos": True} for text in said]
    requests.write_text("\n".join(map(json.dumps, lines)))
    common = ["--model", str(model), "--requests", str(requests), "--max-tokens", "12", "--dtype", "float32"]
    drafts = ["--draft", "none,ngram,suffix:3"]
    page = tmp_path / "report.html"
    loads = ["--load", "1,2"]
    assert command("measure", *common, *drafts, *loads, "--out", str(out), "--report", str(page)) == 0
    shown = capsys.readouterr()
    assert "Load 2 (at once): ngram" in shown.out
    assert "suffix:3" in page.read_text()
    assert command("check", *common, *drafts, "--answers", "64", "--json") == 0
    certificates = json.loads(capsys.readouterr().out)["certificates"]
    assert [one["passed"] for one in certificates] == [True, True]
    assert command("advise", *common, *loads, "--draft", "ngram", "--measured", str(out)) == 0
    shown = capsys.readouterr()
    assert "foredraft serve" in shown.out
    assert "- half of the answers have less than 24 tokens (median 12)" in shown.out
    assert command("advise", "--record", str(out)) == 0
    assert "a step" in capsys.readouterr().out


@pytest.mark.parametrize("draft", ["{}", "{}+suffix", "ngram+{}"])
def test_a_model_takes_memory_beside_a_lookup_too(draft: str, model: Path) -> None:
    llm = LLM(model, dtype="float32", prefix_cache=False)
    bench = open_bench(llm, [Ask("a", "all", {"prompt": "the cat", "max_tokens": 4}, "")], parse_loads("1"))
    method = method_of(bench, draft.format(model))
    assert method.bytes == (model / "model.safetensors").stat().st_size
    assert method.kv_bytes == 3 * 2 * (8 + 8) * 4  # layers, heads, key and value, bytes of a float32


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"tools": []}, ":1 asks for tools=[], which the engine does not take"),
        ({"temperature": -1}, ":1: temperature=-1 is out of range"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, ":1: the messages do not fit"),
    ],
)
def test_requests_that_the_engine_does_not_take_are_named(
    body: Any, message: str, model: Path, tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "x"}]} | body))
    assert command("measure", "--model", str(model), "--requests", str(path), "--load", "1") == 2
    assert message in capsys.readouterr().err
