"""Advice: replay counts what a run counts, and predictions meet measurements where the truth is set."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from serving import patient

from fakes import ContextTarget
from foredraft.cli import main
from foredraft.control import FixedBudget
from foredraft.engine import Engine, EngineConfig
from foredraft.errors import ConfigError
from foredraft.measure import run
from foredraft.measure.advise import Method, Traffic, break_even, predict
from foredraft.measure.costs import LoadCosts
from foredraft.measure.engine_arm import EngineArm, Job
from foredraft.measure.from_record import estimates
from foredraft.measure.recipes import recipes
from foredraft.measure.records import Acceptance, ArmInfo, Header, Record, RecordFile, Result
from foredraft.measure.replay import Known, replay
from foredraft.measure.stats import figures
from foredraft.measure.workload import Ask, Load
from foredraft.propose import NgramProposer
from foredraft.types import Needs, SamplingParams
from tiny_tokenizers import build_chat_model

TOKENS = 40


class SlowTarget(ContextTarget):
    """A pass takes a set time, and some more for each row."""

    pass_s, row_s = 0.008, 0.0005

    def forward(self, batch: Any, kv: Any, hidden_layers: tuple[int, ...] = ()) -> Any:
        end = time.perf_counter() + self.pass_s + self.row_s * len(batch.token_ids)
        out = super().forward(batch, kv, hidden_layers)
        time.sleep(max(0.0, end - time.perf_counter()))
        return out


def engine(target: ContextTarget, proposer: Any, budget: int, seqs: int = 1) -> Engine:
    return Engine(
        target,
        proposer,
        config=EngineConfig(max_seqs=seqs, max_len=200, kv_tokens=seqs * 256, prefix_cache=False),
        controller=FixedBudget(budget) if proposer is not None else None,
    )


def prompts(count: int) -> list[tuple[int, ...]]:
    return [tuple((place * k + 1) % 13 for k in range(3, 11)) for place in range(count)]


def answer(target: ContextTarget, proposer: Any, prompt: Sequence[int], budget: int) -> Any:
    one = engine(target, proposer, budget)
    one.add(prompt, SamplingParams(temperature=0, max_tokens=TOKENS))
    ids: list[int] = []
    while one.has_work:
        for output in one.step():
            ids += output.token_ids
    return ids, output.stats


def known(target: ContextTarget, count: int) -> tuple[Known, ...]:
    return tuple(Known(p, tuple(answer(target, None, p, 0)[0])) for p in prompts(count))


@pytest.mark.parametrize("budget", [1, 4, 15])
def test_replay_counts_what_a_run_counts(budget: int) -> None:
    target = ContextTarget(13, order=2)
    texts = known(target, 4)
    target.forwards = 0
    replayed = replay(NgramProposer(), target, texts, budget)
    assert target.forwards == 0
    for one, stats in zip(texts, replayed, strict=True):
        ids, true = answer(target, NgramProposer(), one.prompt, budget)
        assert tuple(ids) == one.answer
        for name in ("steps", "drafted", "levels", "accepted", "emitted", "accepted_at"):
            assert getattr(stats, name) == getattr(true, name), name


class Watcher(NgramProposer):
    """A proposer that wants hidden states."""

    needs = Needs(hidden_layers=(1,))

    def __init__(self) -> None:
        super().__init__()
        self.positions = 0

    def observe(self, seqs: Any, verdicts: Any, hidden: Any) -> None:
        self.positions += sum(len(layers[0]) for layers in hidden)


def test_replay_runs_the_model_for_drafts_that_want_hidden_states() -> None:
    target = ContextTarget(13, order=2)
    texts = known(target, 1)
    watcher = Watcher()
    replay(watcher, target, texts, 4)
    assert watcher.positions == len(texts[0].prompt) + len(texts[0].answer) - 1


def measured(target: ContextTarget, budget: int, load: int) -> float:
    """The speed-up of n-gram lookup over plain decoding, as measure finds it."""
    asks = [Ask(str(place), "all", {"max_tokens": TOKENS}, "here") for place in range(2 * load)]
    texts = prompts(2 * load)
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    bench: Any = SimpleNamespace(
        encode=lambda ask: Job(ask, list(texts[int(ask.id)]), params),
        llm=SimpleNamespace(model_path=Path("fake"), dtype="float32"),
    )
    arms = [
        EngineArm("none", "none", engine(target, None, 0, load), bench),
        EngineArm("ngram", "ngram", engine(target, NgramProposer(), budget, load), bench),
    ]
    file = RecordFile(None, run.make_header(arms, [Load(concurrency=load)], asks, 0))
    run.measure(arms, asks, [Load(concurrency=load)], file)
    found = figures(file.record, "ngram", str(load))
    assert found is not None
    assert found.speedup is not None
    return found.speedup.value


@patient
def test_predictions_are_within_a_tenth_of_measurements() -> None:
    target = SlowTarget(13, order=2)
    for load in (1, 4):
        texts = known(ContextTarget(13, order=2), 2 * load)
        method = Method("ngram", lambda tokens: NgramProposer())
        advice = predict(target, [method], Traffic(texts, 0.0, -0.5), [load])
        best = advice.best(load)
        assert best.speedup > 1.2
        assert best.speedup == pytest.approx(measured(target, best.budget, load), rel=0.1)


def test_break_even_is_where_the_line_meets_one() -> None:
    assert break_even([(1, 1.5), (4, 1.2), (16, 0.8)]) == pytest.approx(10)
    assert break_even([(1, 0.9)]) == 1
    assert break_even([(1, 1.5), (4, 1.2)]) is None


def test_costs_are_drawn_in_lines() -> None:
    assert LoadCosts(1, 0.1, {1: 1.0, 3: 2.0}).step_s(2) == 1.5


def test_recipes_are_what_engines_take() -> None:
    for name in ("ngram", "suffix", "eagle", "medusa", "some-model"):
        lines = recipes(name, 4, 12)
        start = lines[1].index("{")
        config = json.loads(lines[1][start:-1])
        assert config["num_speculative_tokens"] == 4
        assert config["num_speculative_tokens_per_batch_size"] == [[1, 12, 4], [13, 4096, 0]]
    assert recipes("ngram", 0) == ["leave drafting off: foredraft serve --draft none"]


def record(speedups: dict[str, float]) -> Record:
    """A server that drafts 4 a step, half of it accepted, and is so much faster at each load."""
    arms = tuple(ArmInfo(name, "server", "m", "", "", "usage") for name in ("base", "fast"))
    header = Header("c", "t", {}, {}, arms, tuple(speedups), 1, 0, 31)
    results = []
    for load, speedup in speedups.items():
        told = Acceptance("counters", 10, 40, 40, 21, 31, (9, 7, 4, 1))
        base, fast = (Result("a", "all", arm, load, 0, 0.0, 3.1, 0.1, 31) for arm in ("base", "fast"))
        part = Result("a", "all", "fast", load, 0, 0.0, 0.1 + 3 / speedup, 0.1, 31, acceptance=told)
        results += [base, part]
        assert fast.id == part.id
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


def command(*args: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(args)
    return int(exit_.value.code or 0)


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
    assert "foredraft serve" in capsys.readouterr().out
    assert command("advise", "--record", str(out)) == 0
    assert "a step" in capsys.readouterr().out


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
