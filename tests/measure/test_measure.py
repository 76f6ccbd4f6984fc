"""Measuring servers whose truth is known: times to 0.1 %, rates within 3 %."""

from __future__ import annotations

import asyncio
import json
import math
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from serving import command, counted, mock, serving, serving_arm
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from foredraft.cli.report import show
from foredraft.errors import ConfigError
from foredraft.measure import run
from foredraft.measure.acceptance import from_counters, from_response, parse_metrics
from foredraft.measure.client import Client
from foredraft.measure.files import check_place
from foredraft.measure.mock_server import MockTruth
from foredraft.measure.records import ArmInfo, Header, Record, RecordFile, Result, read_record
from foredraft.measure.run import make_header
from foredraft.measure.server_arm import ServerArm
from foredraft.measure.stats import Figures, figures, speedup
from foredraft.measure.tables import summary, verdicts
from foredraft.measure.wire import Reply, RequestFailed
from foredraft.measure.workload import Ask, Defaults, Load, load_asks, parse_loads, repeated
from foredraft.rows import read_rows

TOKENS = 21
CLOSE = 0.03  # of rates, which are of whole tokens
EXACT = 0.001  # of times, which are counted


def asks(count: int = 4, max_tokens: int = TOKENS) -> list[Ask]:
    return repeated(load_asks([], Defaults(max_tokens=max_tokens)), count)[:count]


@contextmanager
def arms(**truths: dict[str, Any]) -> Iterator[list[ServerArm]]:
    """Arms over mock servers, connected, in counted time."""
    with ExitStack() as stack:
        stack.enter_context(counted())
        made = [stack.enter_context(serving_arm(name, MockTruth(**t))) for name, t in truths.items()]
        for arm in made:
            arm.connect("/v1/chat/completions")
        yield made


def measured(load: Load, some: list[Ask], **truths: dict[str, Any]) -> Record:
    with arms(**truths) as made:
        for arm in made:
            run.warm_up(arm, some)
        file = RecordFile(None, run.make_header(made, [load], some, 0))
        run.measure(made, some, [load], file)
        return file.record


def close(value: float | None, truth: float, within: float = CLOSE) -> bool:
    print(value, truth)
    return value is not None and abs(value / truth - 1) < within


def check_times(found: Figures, ttft: float, inter_token: float, chunk: int) -> None:
    total = ttft + inter_token * (TOKENS - chunk)
    assert close(found.ttft_p50, ttft, EXACT)
    assert close(found.inter_token, inter_token, EXACT)
    assert close(found.user_speed, TOKENS / total, EXACT)
    assert found.tokens == TOKENS * (found.requests - found.failed)


def test_every_figure_is_near_the_truth() -> None:
    base = {"ttft_s": 0.3, "inter_token_s": 0.02}
    fast = {"ttft_s": 0.25, "inter_token_s": 0.012, "chunk": 4, "levels": 4, "accept_rate": 0.5}
    record = measured(Load(concurrency=2), asks(), base=base, fast=fast)
    plain, drafted = (figures(record, arm, "2") for arm in ("base", "fast"))
    assert plain is not None
    assert drafted is not None
    check_times(plain, 0.3, 0.02, 1)
    check_times(drafted, 0.25, 0.012, 4)
    assert close(drafted.throughput, 2 * drafted.user_speed)
    assert plain.accept_rate is None
    assert close(drafted.accept_rate, 0.5)
    assert close(drafted.mean_emitted, 3.0)
    assert drafted.speedup is not None
    assert close(drafted.speedup.value, (0.3 + 0.02 * 20) / (0.25 + 0.012 * 17))
    assert "fast is 1.54x as fast as base" in verdicts(record)[0]


def test_counters_tell_acceptance_where_responses_do_not() -> None:
    truth = {"ttft_s": 0.02, "inter_token_s": 0.001, "levels": 3, "accept_rate": 0.4, "per_response": False}
    record = measured(Load(concurrency=1), asks(8), base=truth)
    found = figures(record, "base", "1")
    assert found is not None
    assert close(found.accept_rate, 0.4)
    assert close(found.mean_emitted, 1 + 0.4 * 3)
    assert all(a >= b for a, b in zip(found.accepted_at, found.accepted_at[1:], strict=False))


def test_a_slow_start_is_warmed_away() -> None:
    truth = {"ttft_s": 0.3, "inter_token_s": 0.02, "slow_first": 3}
    record = measured(Load(concurrency=1), asks(3), base=truth)
    found = figures(record, "base", "1")
    assert found is not None
    check_times(found, 0.3, 0.02, 1)


def test_errors_are_counted_and_kept_out_of_the_figures() -> None:
    truth = {"ttft_s": 0.3, "inter_token_s": 0.02}
    record = measured(Load(concurrency=4), asks(12), base=truth, flaky=truth | {"error_every": 5})
    found = figures(record, "flaky", "4")
    assert found is not None
    assert found.failed in (2, 3)
    check_times(found, 0.3, 0.02, 1)
    (line,) = run.refusals(record)
    assert "HTTP 500: " in line
    assert found.speedup is not None
    assert close(found.speedup.value, 1.0)


def test_a_stalled_request_is_an_error_of_that_request(tmp_path: Path, capsys: Any) -> None:
    truth = {"ttft_s": 0.01, "inter_token_s": 0.001}
    with mock(**truth, stall_every=4) as url, closing(ServerArm("base", Client(url, timeout_s=1.0))) as arm:
        arm.connect("/v1/chat/completions")
        file = RecordFile(None, run.make_header([arm], [Load(concurrency=1)], asks(), 0))
        run.measure([arm], asks(), [Load(concurrency=1)], file)
        (line,) = run.refusals(file.record)
    late = f"{url}/v1/chat/completions gave no whole answer within 1 s: raise --timeout"
    assert f"base at load 1: 1 of 4 failed, as: {late}" in line
    with mock(**truth, stall_every=1) as url:
        for words in (["measure", "--out", str(tmp_path / "out.jsonl")], ["check"]):
            assert command(*words, "--baseline", url, "--variant", f"x={url}", "--timeout", "0.2") == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert f"{url}/v1/chat/completions gave no whole answer within 0.2 s: raise --timeout" in line


@pytest.mark.parametrize("factor", [0.5, 1.25, 2.0])
def test_a_server_that_lies_about_usage_is_found(factor: float) -> None:
    with arms(base={"ttft_s": 0.01, "inter_token_s": 0.001, "usage_factor": factor}) as (arm,):
        assert arm.counter == "logprobs"
        assert "usage is not to be trusted" in arm.info.notes[0]


def test_a_server_that_lies_about_usage_is_counted_otherwise() -> None:
    truth = {"ttft_s": 0.3, "inter_token_s": 0.02, "usage_factor": 0.5}
    record = measured(Load(concurrency=1), asks(2), base=truth)
    found = figures(record, "base", "1")
    assert found is not None
    check_times(found, 0.3, 0.02, 1)


def test_requests_arrive_at_a_rate() -> None:
    record = measured(Load(rate=20.0), asks(12, 4), base={"ttft_s": 0.05, "inter_token_s": 0.001})
    starts = sorted(r.start_s for r in record.results)
    assert starts[-1] - starts[0] == pytest.approx(
        list(Load(rate=20.0).arrivals(12, 0))[-1] - next(Load(rate=20.0).arrivals(12, 0)), abs=0.05
    )


def test_different_models_are_refused() -> None:
    truth = {"ttft_s": 0.01, "inter_token_s": 0.001}
    with (
        arms(base=truth, other=truth | {"salt": "x"}) as made,
        pytest.raises(ConfigError, match="same model"),
    ):
        run.check_same_model(made, asks())
    with arms(base=truth, other=truth) as made:
        run.check_same_model(made, asks())


def test_a_load_that_a_server_does_not_admit_is_named() -> None:
    truth = {"ttft_s": 0.05, "inter_token_s": 0.001, "most": 2}
    record = measured(Load(concurrency=6), asks(12, 8), base=truth)
    (line,) = run.refusals(record)
    assert "at load 6" in line
    assert "429" in line
    assert line.endswith("lower the load, or raise the server's limit")


def test_the_command_writes_records_that_report_reads(tmp_path: Path, capsys: Any) -> None:
    truth = {"ttft_s": 0.01, "inter_token_s": 0.001}
    requests = tmp_path / "requests.jsonl"
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}
    lines = [{"body": body}, {"id": "x", "category": "chat", **body}, {"prompt": "once", "temperature": 0.5}]
    requests.write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "measure.jsonl"
    with mock(**truth) as base, mock(**truth | {"levels": 2}) as fast:
        common = ["--baseline", base, "--variant", f"fast={fast}", "--requests", str(requests)]
        assert command("measure", *common, "--load", "1,2", "--out", str(out)) == 0
    shown = capsys.readouterr()
    assert "Load 1 (at once): fast" in shown.out
    assert "metrics.speculative_decoding" in shown.err
    one, many = tmp_path / "one.jsonl", tmp_path / "many.jsonl"
    kept = out.read_text().splitlines(keepends=True)
    for path, load in ((one, "1"), (many, "2")):
        path.write_text(kept[0] + "".join(line for line in kept[1:] if json.loads(line)["load"] == load))
    assert summary(read_record([one, many]))["figures"] == summary(read_record([out]))["figures"]
    with pytest.raises(ConfigError, match="'baseline' at load 1 was measured in two of these runs"):
        read_record([out, one])
    record = read_record([out])
    assert {(r.arm, r.load) for r in record.results} == {(a, n) for a in ("baseline", "fast") for n in "12"}
    assert record.header.machine["cores"]
    assert command("report", str(out), "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(summary(record)))


def test_an_interrupt_keeps_what_was_measured(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    out = tmp_path / "measure.jsonl"
    seen = []

    def interrupted(self: RecordFile, result: Any) -> None:
        seen.append(result)
        add(self, result)
        if len(seen) == 3:
            signal.raise_signal(signal.SIGINT)

    add = RecordFile.add
    monkeypatch.setattr(RecordFile, "add", interrupted)
    with mock(ttft_s=0.01, inter_token_s=0.001) as base:
        assert command("measure", "--baseline", base, "--load", "1", "--out", str(out)) == 130
    assert "all requests" in capsys.readouterr().out
    assert len(read_record([out]).results) == 3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--baseline", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
        (["--baseline", "localhost:8000"], "is no URL of a server"),
        (["--variant", "fast"], "use NAME=URL"),
        (["--baseline", "URL", "--model-name", "other"], "serves no 'other' but mock"),
        (["--baseline", "URL", "--load", "none"], "--load 'none' is no load"),
        (["--baseline", "URL", "--rate", "-1"], "--rate '-1' is no rate"),
        (["--baseline", "URL", "--requests", "/nowhere"], "/nowhere cannot be read"),
        (["--baseline", "URL", "--limit", "0"], "--limit 0 is too small"),
        (["--baseline", "URL", "--timeout", "0"], "--timeout 0 is no limit"),
        (["--draft", "none,none"], "no list of different drafts"),
        (["--draft", "none,nosuch"], "draft='nosuch' is unknown"),
        (["--draft", "none:5"], "--draft none:5 gives no draft a budget"),
        (["--baseline", "URL", "--draft", "ngram", "--dtype", "float32"], "--draft, --dtype is for engines"),
        (["--baseline", "URL", "--load", "1,1"], "two loads are the same"),
        (["--baseline", "URL", "--load", "1,4,16", "--rate", "2,2.0"], "of 1, 4, 16, 2/s, 2/s"),
        (["--baseline", "URL", "--report", "/"], "/ cannot be written (Is a directory): name another file"),
        (["--baseline", "http://[::1"], "'http://[::1' is no URL of a server"),
        (["--baseline", "http://"], "'http://' is no URL of a server"),
        (["--baseline", "URL", "--api-key", "\u00e9"], "the API key is not plain ASCII"),
        (["--baseline", "URL", "--temperature", "nan"], "--temperature nan is none"),
    ],
)
def test_user_errors_are_one_line(args: list[str], message: str, tmp_path: Path, capsys: Any) -> None:
    with mock() as url:
        given = [url if arg == "URL" else arg for arg in args]
        assert command("measure", *given, "--out", str(tmp_path / "out.jsonl")) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1


def test_places_are_looked_at_before_the_work(tmp_path: Path, capsys: Any) -> None:
    check_place(tmp_path / "new" / "records.jsonl")
    assert not list((tmp_path / "new").iterdir())
    assert command("measure", "--model", "/nowhere", "--out", str(tmp_path)) == 2
    assert f"{tmp_path} cannot be written" in capsys.readouterr().err


def test_a_full_disk_loses_no_figures(capsys: Any) -> None:
    with mock(ttft_s=0.0, inter_token_s=0.0) as url:
        asked = ["--load", "1", "--limit", "2", "--max-tokens", "4", "--out", "/dev/full"]
        assert command("measure", "--baseline", url, *asked) == 2
    shown = capsys.readouterr()
    assert "all requests" in shown.out
    assert "error: /dev/full cannot be written (No space left on device)" in shown.err


def test_half_a_character_is_kept_as_json_writes_it(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "a.jsonl", make_header([], [], asks(), 0))
    file.add(Result("a", "all", "base", "1", 0, 0.0, math.nan, text="\ud83d\ude00"))
    file.close()
    (_, _), (_, row) = read_rows(tmp_path / "a.jsonl")
    assert (row["text"], row["total_s"]) == ("\U0001f600", None)


def test_names_are_shown_as_they_are(capsys: Any) -> None:
    arms = tuple(ArmInfo(name, "server", "m", "", "", "usage") for name in ("base", "[/red]x"))
    results = [
        Result("a", category, arm.name, "1", 0, 0.0, 1.0, 0.1, 10)
        for category in ("[/nope]", "b")
        for arm in arms
    ]
    record = Record(Header("c", "t", {}, {}, arms, ("1",), 2, 0, 10), results)
    show(record, report=None, by_category=True, as_json=False)
    shown = capsys.readouterr().out
    assert "[/nope]" in shown
    assert shown.count("[/red]x") == 4


def test_the_mock_server_says_where_it_is(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: None)
    assert command("mock-server", "--port", "0") == 0
    assert re.match(r"mock at http://127\.0\.0\.1:[1-9]\d*; Ctrl-C ends\n", capsys.readouterr().err)


def test_a_wrong_key_and_a_server_of_another_kind_are_named(capsys: Any) -> None:
    with mock(api_key="secret") as url:
        assert command("measure", "--baseline", url, "--api-key", "wrong") == 2
        assert "refuses this key (HTTP 401)" in capsys.readouterr().err
    page = Starlette(routes=[Route("/v1/models", lambda request: PlainTextResponse("hello"))])
    with serving(page) as url:
        assert command("measure", "--baseline", url) == 2
        assert "is it an OpenAI-compatible server?" in capsys.readouterr().err
    models = Route("/v1/models", lambda request: JSONResponse({"data": [{"id": "m"}]}))
    refusal = JSONResponse({"error": {"message": "not today"}})
    chat = Route("/v1/chat/completions", lambda request: refusal, methods=["POST"])
    with serving(Starlette(routes=[models, chat])) as url:
        assert command("measure", "--baseline", url) == 2
        assert 'does not answer a plain request: {"message": "not today"}' in capsys.readouterr().err


def said(**choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "finish_reason": None, **choice}]}


@pytest.mark.parametrize(
    ("chunk", "text", "usage"),
    [
        (said(delta={"content": "a", "tool_calls": None, "role": None}), "a", None),
        (said(delta=None, text=None), "", None),
        (
            said(message={"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}),
            "ab",
            None,
        ),
        ({"choices": None, "error": None, "usage": {"completion_tokens": 3}}, "", 3),
        ({"choices": [], "usage": {"completion_tokens": "3"}}, "", None),
        ({"choices": [], "usage": "three"}, "", None),
        (said(delta={"reasoning": "a", "content": "b"}), "ab", None),
    ],
)
def test_replies_are_read_as_they_are_meant(chunk: dict[str, Any], text: str, usage: int | None) -> None:
    reply = Reply()
    reply.take(chunk, 1.0)
    assert (reply.text, reply.usage) == (text, usage)


def test_a_probability_of_nothing_is_the_lowest() -> None:
    reply = Reply()
    told = [{"token": "a", "logprob": -0.5, "top_logprobs": [{"token": "b", "logprob": None}]}]
    reply.take(said(delta={"content": "a"}, logprobs={"content": told}), 1.0)
    told = [{"a": -0.5, "b": None}]
    for nothing in (None, -math.inf, math.nan):
        legacy = {"tokens": ["a"], "token_logprobs": [nothing], "top_logprobs": told}
        reply.take(said(text="a", logprobs=legacy), 1.0)
    assert reply.tokens is not None
    found = [(token.logprob, token.top["b"]) for token in reply.tokens]
    assert found == [(-0.5, -9999), *[(-9999, -9999)] * 3]


@pytest.mark.parametrize(
    "chunk",
    [
        {"choices": ["a"]},
        said(delta="a"),
        said(delta={"content": 5}),
        said(delta={"content": "a"}, logprobs={"content": [{}]}),
    ],
)
def test_what_is_no_reply_is_an_error_of_its_request(chunk: dict[str, Any]) -> None:
    with pytest.raises(RequestFailed, match="no OpenAI reply"):
        Reply().take(chunk, 1.0)


def streamed(*lines: str) -> Reply:
    """What a client makes of a stream of such lines, the last of which has no end."""

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": "\r\n".join(lines).encode()})

    with serving(stream) as url, asyncio.Runner() as loop:
        client = Client(url, model="m")
        try:
            return loop.run(client.ask("/v1/completions", {"prompt": "x"}, stream=True))
        finally:
            loop.run(client.close())


def test_events_are_read_as_servers_write_them() -> None:
    text = "a\u2028b\u0085"  # not all that str.splitlines takes for line ends
    reply = streamed(
        ": ping",
        "event: message",
        "id: 7",
        f"data:{json.dumps(said(delta={'content': text}), ensure_ascii=False)}",
        "",
        f"data: {json.dumps(said(delta={}, finish_reason='stop'))}",
    )
    assert (reply.text, reply.finish) == (text, "stop")
    reply = streamed(json.dumps(said(message={"content": "a"}, finish_reason="stop")))
    assert (reply.text, reply.finish) == ("a", "stop")
    with pytest.raises(RequestFailed, match="without a finish_reason"):
        streamed('data: {"choices": null, "usage": {"completion_tokens": 3}}', "data: [DONE]")


def test_an_answer_that_breaks_off_has_failed_and_is_not_asked_for_again() -> None:
    asked = []

    async def half(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])
        headers = [(b"content-length", b"100")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"data: {", "more_body": True})

    with serving(half) as url, asyncio.Runner() as loop:
        client = Client(url, model="m")
        with pytest.raises(RequestFailed, match="the connection broke"):
            loop.run(client.ask("/v1/completions", {"prompt": "x"}, stream=True))
        loop.run(client.close())
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no request"),
        ("{}", ":1 has neither"),
        ('{"prompt": "x"}\n{"prompt', ":2 is no JSON"),
        ('{"prompt": "x", "temperature": NaN}', ":1 is no JSON: NaN is no finite number"),
        ('{"prompt": "x", "temperature": 1e999}', ":1 is no JSON: 1e999 is no finite number"),
        (
            '{"messages": [{"role": "assistant", "content": "x"}]}',
            ":1 has no message but the assistant's own",
        ),
        ('{"messages": ["x"]}', ":1: messages[0] is no"),
        ('{"prompt": "x", "n": "two"}', ":1 asks for n='two'"),
        ('{"prompt": "x", "n": 65}', ":1 asks for n=65"),
        ('{"prompt": "x", "max_tokens": "many"}', ":1 has max_tokens 'many'"),
        ('{"prompt": "\\ud83d"}', ":1 has half a character"),
    ],
)
def test_bad_request_files_name_the_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_asks([path], Defaults())
    assert message in str(error.value)


def test_answers_to_one_request_are_requests(tmp_path: Path) -> None:
    """Several prompts and several answers to each are asked one by one, with the seeds that servers give."""
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt": ["x", "y"], "n": 2, "seed": 7}\n{"prompt": [[5, 6]], "n": 2}\n')
    asked = [(ask.body["prompt"], ask.body["seed"]) for ask in load_asks([path], Defaults(seed=20))]
    assert asked == [("x", 7), ("x", 8), ("y", 7), ("y", 8), ([5, 6], 24), ([5, 6], 25)]


def test_a_mark_at_the_start_is_no_part_of_a_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "x"}', encoding="utf-8-sig")
    assert [row for _, row in read_rows(path)] == [{"prompt": "x"}]


def test_records_hold_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        "foredraft",
        "measure",
        "--api-key",
        "secret",
        "--api-key=secret",
        "--baseline",
        "http://me:secret@a/v1",
    ]
    monkeypatch.setattr("sys.argv", words)
    command = make_header([], [], load_asks([], Defaults(), 1), 0).command
    assert "secret" not in command
    assert "http://…@a/v1" in command


@pytest.mark.parametrize(("blocks", "wider"), [(4, 1.87), (12, 1.17), (100, 1.02)])
def test_intervals_of_few_blocks_are_wider(blocks: int, wider: float) -> None:
    """A percentile bootstrap of four blocks holds the truth in 79 of 100 cases, and is to in 95."""

    def results(arm: str, spread: float) -> list[Result]:
        times = [1.0 + spread * (block % 2) for block in range(blocks)]
        return [
            Result(str(b), "all", arm, "1", b, 0.0, seconds, emitted=9) for b, seconds in enumerate(times)
        ]

    found = speedup(results("fast", 0.2), results("base", 0.0))
    assert found is not None
    assert found.low is not None
    normal = 1.96 * 0.1 / 1.1 / blocks**0.5  # of the logarithm, roughly
    assert math.log(found.value / found.low) == pytest.approx(wider * normal, rel=0.25)


def test_rows_end_at_line_feeds_alone(tmp_path: Path) -> None:
    """JSON strings may hold what str.splitlines takes for line ends; rows may end as on Windows."""
    path, texts = tmp_path / "requests.jsonl", ["a\u2028b\u2029c", "d\u0085e"]
    rows = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    path.write_bytes("\r\n".join([*rows, ""]).encode())
    assert [row["prompt"] for _, row in read_rows(path)] == texts


def test_records_that_are_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    for text in (
        '{"kind": "request"}',
        '{"kind": "header", "format": 9}',
        '{"kind": "header", "format": 1, "arms": ["a"]}',
        "",
    ):
        path.write_text(text)
        with pytest.raises(ConfigError):
            read_record([path])


@pytest.mark.parametrize(("blocks", "told"), [(3, False), (4, True)])
def test_requests_that_ran_together_are_no_repeats_of_each_other(blocks: int, told: bool) -> None:
    def results(arm: str, total_s: float) -> list[Result]:
        places = [(block, each) for block in range(blocks) for each in range(8)]
        return [Result(f"{b}.{n}", "all", arm, "2", b, 0.0, total_s + b / 10, emitted=9) for b, n in places]

    found = speedup(results("fast", 1.0), results("base", 2.0))
    assert found is not None
    assert (found.low is not None) == told
    assert found.value == pytest.approx((2 + (blocks - 1) / 20) / (1 + (blocks - 1) / 20))


def test_loads_and_blocks() -> None:
    assert [load.label for load in parse_loads("1,4", "0.5")] == ["1", "4", "0.5/s"]
    some = asks(12)
    assert [len(part) for part in run.blocks(some, Load(concurrency=1))] == [1] * 12
    assert [len(part) for part in run.blocks(some, Load(concurrency=2))] == [8, 4]
    assert [len(part) for part in run.blocks(some, Load(concurrency=16))] == [32]
    ids = [ask.id for part in run.blocks(some, Load(concurrency=16)) for ask in part]
    assert len(set(ids)) == 32


PAGE = """# HELP x
vllm:spec_decode_num_drafts_total{engine="0"} 10
vllm:spec_decode_num_draft_tokens_total{engine="0"} 30.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 12
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 8
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 4
vllm:spec_decode_num_accepted_tokens_created 1.7e9
"""


NOTHING_YET = re.sub(r" [\d.e]+$", " 0", PAGE, flags=re.MULTILINE)


@pytest.mark.parametrize("engine", ["vllm", "foredraft", "llamacpp"])
def test_counters_of_engines_are_read(engine: str) -> None:
    before, after = (parse_metrics(page.replace("vllm", engine)) for page in (NOTHING_YET, PAGE))
    told = from_counters(before, after, emitted=32)
    assert told is not None
    assert (told.accepted, told.levels, told.steps, told.accepted_at) == (12, 30, 20, (8, 4))


def test_a_server_that_counts_levels_and_tokens_is_believed() -> None:
    own = "foredraft:spec_decode_num_draft_levels_total 24\nforedraft:generation_tokens_total 40\n"
    page = PAGE.replace("vllm", "foredraft") + own
    before = {key: 0.0 for key in parse_metrics(page)}
    told = from_counters(before, parse_metrics(page), emitted=None)  # some of the answers failed
    assert told is not None
    assert (told.drafted, told.levels, told.emitted, told.steps) == (30, 24, 40, 28)


def test_half_of_a_reading_is_none() -> None:
    after = parse_metrics(PAGE)
    assert from_counters({}, after, emitted=32) is None  # else a server's whole past would be this block's
    assert from_counters(after, {}, emitted=32) is None
    assert from_counters(parse_metrics(NOTHING_YET), after, emitted=None) is None
    assert from_counters(after, parse_metrics(NOTHING_YET), emitted=32) is None  # it began anew
    assert parse_metrics("sglang:spec_accept_length NaN\n") == {}


def test_our_own_answers_tell_levels() -> None:
    vllm = {"num_accepted_draft_tokens": 6, "num_draft_tokens": 40, "acceptance_histogram": [1, 3, 0, 1]}
    own = {"steps": 7, "drafted": 40, "levels": 15, "accepted": 6, "emitted": 13, "accepted_at": [4, 1, 1]}
    told = from_response({"metrics": {"speculative_decoding": vllm, "foredraft": own}}, emitted=13)
    assert told is not None
    assert (told.steps, told.levels, told.emitted, told.accepted_at) == (7, 15, 13, (4, 1, 1))
    told = from_response({"metrics": {"speculative_decoding": vllm}}, emitted=13)
    assert told is not None
    assert (told.steps, told.levels, told.accepted_at) == (7, 40, (4, 1, 1))
    reply = Reply()
    reply.take(said(text="", speculative_decoding_stats=vllm | {"acceptance_histogram": {"1": 3, "3": 1}}), 1)
    assert from_response(reply.last, emitted=13) == told
    reply.take(said(text="", meta_info={"spec_num_correct_drafts": 6, "spec_num_proposed_drafts": 40}), 1)
    told = from_response({"meta_info": reply.last["meta_info"]}, emitted=13)
    assert told is not None
    assert (told.steps, told.levels) == (7, 40)


@pytest.mark.parametrize(
    "answer",
    [
        {"metrics": {"speculative_decoding": {"num_accepted_draft_tokens": None}}},
        {"metrics": {"speculative_decoding": {"num_accepted_draft_tokens": 6, "acceptance_histogram": 3}}},
        {"metrics": {"foredraft": {"levels": 3}}},
        {"metrics": "fast", "timings": {"predicted_n": 3, "draft_n": "some"}},
        {"meta_info": {"spec_num_correct_drafts": 3}},
    ],
)
def test_counts_that_are_none_are_not_told(answer: dict[str, Any]) -> None:
    assert from_response(answer, emitted=13) is None


def test_gauges_of_several_ranks_are_averaged() -> None:
    page = "".join(f'sglang:spec_accept_length{{dp_rank="{rank}"}} {2 + rank / 2}\n' for rank in range(2))
    assert parse_metrics(page) == {"gauge.mean_emitted": 2.25}


def test_other_engines_are_converted() -> None:
    gauges = parse_metrics("sglang:spec_accept_length 2.5\nsglang:spec_accept_rate 0.5\n")
    told = from_counters({}, gauges, emitted=100)
    assert told is not None
    assert (told.steps, told.accepted, told.levels) == (40, 60, 120)
    trt = "trtllm_spec_decode_num_draft_tokens_total 8\ntrtllm_spec_decode_num_accepted_tokens_total 4\n"
    told = from_counters({"drafted": 0.0, "accepted": 0.0}, parse_metrics(trt), emitted=10)
    assert told is not None
    assert (told.steps, told.accepted, told.levels) == (6, 4, 8)
    timings = {"timings": {"predicted_n": 20, "draft_n": 15, "draft_n_accepted": 10}}
    told = from_response(timings, emitted=20)
    assert told is not None
    assert (told.steps, told.accepted, told.levels) == (10, 10, 15)
    assert from_response({}, emitted=20) is None
    assert from_counters({}, {}, emitted=20) is None
