"""Limits, refusals, metrics, disconnects, shutdown: what clients it cannot trust meet."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from foredraft.errors import ConfigError
from foredraft.measure.acceptance import from_counters, parse_metrics
from foredraft.server.answers import Choice
from foredraft.server.config import ServeConfig, read_keys
from foredraft.server.service import Service

MESSAGES = [{"role": "user", "content": "the cat"}]
LONG: Any = {"messages": MESSAGES, "temperature": 0, "max_tokens": 1500, "logit_bias": {"1": -100}}
CHAT = "/v1/chat/completions"
DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"


def test_figures_of_one_answer_agree(server: Any) -> None:
    body = server.chat(max_tokens=40).json()
    spec, own = body["metrics"]["speculative_decoding"], body["metrics"]["foredraft"]
    assert own["emitted"] == body["usage"]["completion_tokens"]
    assert spec["num_draft_tokens"] == own["drafted"] > 0
    assert sum(spec["acceptance_histogram"]) == spec["num_spec_steps"] <= own["steps"]
    assert sum(i * n for i, n in enumerate(spec["acceptance_histogram"])) == own["accepted"]
    assert spec["num_accepted_draft_tokens"] == own["accepted"] == sum(own["accepted_at"])
    assert spec["mean_acceptance_length"] == pytest.approx(1 + own["accepted"] / spec["num_spec_steps"])


def test_a_request_may_turn_drafting_off(server: Any) -> None:
    drafted, plain = (
        server.chat(max_tokens=40).json(),
        server.chat(max_tokens=40, foredraft={"budget": 0}).json(),
    )
    assert plain["metrics"]["foredraft"]["drafted"] == 0
    assert plain["choices"] == drafted["choices"]
    assert plain["usage"] == drafted["usage"]


def test_a_trace_tells_where_tokens_came_from(server: Any) -> None:
    body = {
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": 40,
        "stream": True,
        "foredraft": {"trace": True},
    }
    with server.http.stream("POST", CHAT, json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    tokens = [token for chunk in chunks for token in chunk["foredraft"]["tokens"]]
    assert {token["origin"] for token in tokens} <= set("arb")
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    assert "".join(token["text"] for token in tokens).rstrip("\ufffd") == text.rstrip("\ufffd")


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"properties": {"a": schema}}
    return schema


def as_format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def as_tool(schema: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "x", "parameters": schema}}]}


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"best_of": 2}, "best_of", "best_of is not supported"),
        ({"functions": [{"name": "x"}]}, "functions", "not supported"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"temperature": "1"}, "temperature", 'temperature should be a valid number, not "1"'),
        ({"stop": 5}, "stop", "stop should be a valid string or a valid list, not 5"),
        ({"stop": ["a", 5]}, "stop.1", "stop.1 should be a valid string, not 5"),
        ({"stop": ""}, "stop", "stop: Value should have at least 1 item"),
        ({"logit_bias": [1]}, "logit_bias", "logit_bias should be an object, not a list"),
        ({"suffix": "x"}, "suffix", "suffix is not supported"),
        ({"echo": 0}, "echo", "echo is not supported"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"messages": []}, "messages", "at least 1"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content.0.type",
            "messages.0.content.0.type: only text parts are understood, not image_url",
        ),
        ({"messages": [5]}, "messages.0", "messages.0 should be an object, not 5"),
        ({"messages": [{"content": "x"}]}, "messages.0.role", "messages.0.role is missing"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages", "unknown role nobody"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "'x', which is no token id"),
        ({"logit_bias": {"9999": 1}}, "logit_bias", "logit_bias has token 9999"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"min_tokens": 13}, "min_tokens", "min_tokens=13 contradicts max_tokens=12"),
        ({"tool_choice": "x"}, "tool_choice", "'none', 'auto' or 'required' or an object, not \"x\""),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function", "tool_choice.function is missing"),
        ({"foredraft": {"budget": 300}}, "foredraft.budget", "less than or equal to 256 or 'auto', not 300"),
        ({"foredraft": {"speed": 1}}, "foredraft.speed", "foredraft.speed is not supported"),
        ({"messages": [{"role": "user", "content": "cat " * 3000}]}, "messages", "the prompt has"),
        (as_format({"type": "foo"}), "response_format", "Invalid type: foo"),
        (as_tool({}) | as_format({"type": "foo"}), "response_format", "Invalid type: foo"),
        (as_format({"pattern": "(?=a)"}), "response_format", "look-around, including look-ahead"),
        (as_format(nested(130)), "response_format", "supported: it is nested too deeply, use at most 120"),
        (as_tool(nested(130)), "tools", "it is nested too deeply, use at most 120 levels"),
        (as_tool(nested(400)), "tools", "it is nested too deeply, use at most 120 levels"),
        ({"response_format": {}}, "response_format", "response_format.type is missing"),
        ({"response_format": {"type": "xml"}}, "response_format", "'json_schema', not \"xml\""),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "response_format.json_schema.schema is missing",
        ),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, None, "a grammar decides"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content", "no valid Unicode"),
        ({"messages": [{"role": "\ud800", "content": "x"}]}, "messages.0.role", "no valid Unicode"),
        (
            {"tools": [{"type": "function", "function": {"name": "x", "description": "\ud800"}}]},
            "tools.0.function.description",
            "no valid Unicode",
        ),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(
    server: Any, change: Any, param: str | None, said: str
) -> None:
    response = server.http.post(
        CHAT,
        content=json.dumps({"messages": MESSAGES, "max_tokens": 12, **change}),
        headers={"content-type": "application/json"},
    )
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert said in error["message"]
    assert not re.search(r"function-|constrained|TextPart|literal\[|Value error", error["message"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the body is missing"),
        (
            b'{"a": 1,}',
            "the body is no JSON: Expecting property name enclosed in double quotes at character 8",
        ),
        (b"[]", "the body should be an object, not a list"),
        (b'{"a": "\xff"}', "the body is no JSON: byte 7 is not of UTF-8"),
        (b'{"messages": NaN}', "messages should be a valid list, not NaN"),
        (b"[" * 100_000, "the body is no JSON: it is nested too deeply"),
        (b"1" * 5000, "the body is no JSON: a number has too many digits"),
    ],
)
def test_broken_bodies_are_refused(server: Any, content: bytes, said: str) -> None:
    response = server.http.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert said in error["message"]
    assert error["param"] == ("messages" if "NaN" in said else None)


@pytest.mark.parametrize("headers", [{}, {"content-type": "application/x-www-form-urlencoded"}])
def test_a_body_that_does_not_say_what_it_is_is_refused(server: Any, headers: Any) -> None:
    response = server.http.post(CHAT, content=json.dumps(LONG), headers=headers)
    assert response.status_code == 400
    assert "send content-type: application/json" in response.json()["error"]["message"]


def test_what_asks_for_nothing_is_no_matter(server: Any) -> None:
    nothing = {"user": "me", "store": False, "service_tier": "auto", "metadata": None, "modalities": ["text"]}
    nothing |= {"prompt_cache_key": "k", "safety_identifier": "s", "functions": [], "function_call": "none"}
    nothing |= {"seed": -1, "top_k": -1, "skip_special_tokens": True, "spaces_between_special_tokens": True}
    nothing |= {"length_penalty": 1.0, "use_beam_search": False, "priority": 0, "cache_prompt": True}
    nothing |= {"include_stop_str_in_output": False, "reasoning_effort": None}
    named = [{**MESSAGES[0], "name": "tom"}]
    assert (
        server.chat(**nothing, messages=named).json()["choices"]
        == (server.chat(messages=MESSAGES).json()["choices"])
    )
    stream = {"stream": True, "stream_options": {"include_obfuscation": False}}
    assert server.chat(**stream, service_tier="default", metadata={"a": "b"}).status_code == 200
    text = {"prompt": "the cat", "max_tokens": 2, "suffix": None, "best_of": 1, "echo": False}
    assert server.post("/v1/completions", text).status_code == 200


def test_unknown_paths_and_methods(server: Any) -> None:
    for path in ("/", "/health"):
        head = server.http.head(path)
        assert (head.status_code, head.content) == (200, b"")
    assert server.http.get("/v2").status_code == 404
    assert server.http.get(CHAT).status_code == 405
    assert server.http.get(CHAT).json()["error"]["message"] == "Method Not Allowed"


def test_request_ids(server: Any) -> None:
    given = server.chat(max_tokens=1).headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{24}", given)
    own = server.http.get("/health", headers={"x-request-id": "mine-1"})
    assert own.headers["x-request-id"] == "mine-1"
    odd = server.http.get("/health", headers={"x-request-id": "a b"})
    assert odd.headers["x-request-id"] != "a b"


def test_large_bodies_are_refused(serve: Callable[..., Any]) -> None:
    with serve(max_body=2000) as server:
        assert server.chat(messages=[{"role": "user", "content": "x" * 3000}]).status_code == 413
        chunks = iter([b"[" * 1500, b"[" * 1500])
        with contextlib.suppress(httpx2.WriteError):  # the server may hang up on the rest
            assert server.http.post(CHAT, content=chunks).status_code == 413
        assert server.chat().status_code == 200


def test_keys(serve: Callable[..., Any], tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("first\n# ours, für uns\n\nsecond\n", encoding="utf-8-sig")
    with serve(api_keys=read_keys(file)) as server:
        for key, status in (("first", 200), ("second", 200), ("third", 401), ("", 401)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            assert server.http.get("/v1/models", headers=headers).status_code == status
        assert server.http.get("/metrics").status_code == 401
        assert server.http.get("/health").status_code == server.http.get("/").status_code == 200
        refusal = server.http.post(CHAT, json={}).json()["error"]
        assert refusal["code"] == "invalid_api_key"
        assert server.openai.models.list().data[0].id == "tiny"
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="has no key"):
        read_keys(file)
    file.write_text("first\nsécond\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="line 2, is not ASCII") as refused:
        read_keys(file)
    assert "cond" not in str(refused.value).replace(str(file), "")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path / "missing")
    assert "first" not in repr(ServeConfig("m", api_keys=("first",)))


def test_a_full_queue_says_when_to_come_back(serve: Callable[..., Any]) -> None:
    with serve(max_seqs=1, max_queue=1) as server:
        threads = [threading.Thread(target=server.post, args=(CHAT, LONG)) for _ in range(2)]
        for thread in threads:
            thread.start()
        while server.service._places < 2:
            time.sleep(0.01)
        refused = server.post(CHAT, LONG)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert server.chat(n=2).status_code == 429
        too_many = server.chat(n=3)  # for which there never is room
        assert too_many.status_code == 400
        assert "3 answers" in too_many.json()["error"]["message"]
        assert "can hold, 2:" in too_many.json()["error"]["message"]
        assert "--max-queue" in too_many.json()["error"]["message"]
        for thread in threads:
            thread.join()
        assert server.chat().status_code == 200


def test_a_deadline_ends_answers(serve: Callable[..., Any]) -> None:
    with serve(deadline_s=0.3) as server:
        assert server.post(CHAT, LONG).status_code == 504
        with server.http.stream("POST", CHAT, json=LONG | {"stream": True}) as response:
            lines = [line for line in response.iter_lines() if line]
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "deadline"
        assert lines[-1] == "data: [DONE]"
        assert server.idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_place(server: Any, stream: bool) -> None:
    body = json.dumps(LONG | {"stream": stream, "n": 2}).encode()
    kind = "content-type: application/json"
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        if stream:
            assert connection.recv(100)
        while server.service.worker._engine.load.running < 2:
            time.sleep(0.01)
    gone = time.monotonic()
    assert server.idle()
    assert time.monotonic() - gone < 1
    assert server.chat().status_code == 200


def test_a_slow_reader_holds_nobody_up(server: Any) -> None:
    with server.http.stream("POST", CHAT, json=LONG | {"stream": True, "max_tokens": 300}) as response:
        assert server.chat().status_code == 200
        text = response.read().decode()
    assert text.endswith("data: [DONE]\n\n")


SERVED = 'engine="0",model_name="tiny"'


def test_metrics(server: Any) -> None:
    def read() -> tuple[str, dict[str, float]]:
        text = server.http.get("/metrics").text
        lines = [line for line in text.splitlines() if line[0] != "#"]
        return text, {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}

    (page_before, before), answer = read(), server.chat(max_tokens=40).json()
    assert server.idle()
    page_after, after = read()
    own = answer["metrics"]["foredraft"]

    def grown(name: str, labels: str = f"{{{SERVED}}}") -> float:
        return after[f"foredraft:{name}{labels}"] - before[f"foredraft:{name}{labels}"]

    assert grown("generation_tokens_total") == own["emitted"]
    assert grown("prompt_tokens_total") == answer["usage"]["prompt_tokens"]
    assert grown("spec_decode_num_draft_tokens_total") == own["drafted"]
    assert grown("spec_decode_num_draft_levels_total") == own["levels"]
    assert grown("spec_decode_num_accepted_tokens_total") == own["accepted"]
    for position, count in enumerate([*own["accepted_at"], *[0] * 8][:8]):
        labels = f'{{{SERVED},position="{position}"}}'
        assert grown("spec_decode_num_accepted_tokens_per_pos_total", labels) == count
    assert (
        grown("spec_decode_num_drafts_total") == answer["metrics"]["speculative_decoding"]["num_spec_steps"]
    )
    assert grown("time_to_first_token_seconds_count") == grown("e2e_request_latency_seconds_count") == 1
    assert grown("draft_nodes_count", "") == own["steps"]
    assert grown("engine_seconds_total", '{part="target"}') > 0
    reason = answer["choices"][0]["finish_reason"]
    assert after[
        f'foredraft:request_success_total{{engine="0",finished_reason="{reason}",model_name="tiny"}}'
    ]
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert after[f"foredraft:{gauge}{{{SERVED}}}"] == 0
    told = from_counters(parse_metrics(page_before), parse_metrics(page_after), emitted=None)
    assert told is not None
    assert (told.drafted, told.levels, told.accepted) == (own["drafted"], own["levels"], own["accepted"])
    assert (told.emitted, list(told.accepted_at)) == (own["emitted"], own["accepted_at"])


def test_the_dashboard_asks_for_what_there_is(server: Any) -> None:
    asked = set(re.findall(r"foredraft:\w+", DASHBOARD.read_text()))
    there = {
        f"foredraft:{name}"
        for name in re.findall(r"^# TYPE foredraft:(\w+)", server.http.get("/metrics").text, re.M)
    }
    assert {name for name in asked if re.sub("_(bucket|sum|count)$", "", name) not in there} == set()


def test_a_failed_step_fails_only_what_ran(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve() as server:
        engine = server.service.worker._engine
        step = engine.step
        monkeypatch.setattr(engine, "step", lambda: 1 / 0)
        assert server.chat().status_code == 500
        assert server.http.get("/health").status_code == 503
        monkeypatch.setattr(engine, "step", step)
        assert server.chat().status_code == 200
        assert server.http.get("/health").status_code == 200


def test_health_is_bad_as_long_as_every_step_fails(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve() as server:
        with monkeypatch.context() as patch:
            patch.setattr(server.service.worker._engine.target, "forward", lambda *_, **__: 1 / 0)
            for _ in range(2):
                assert server.chat().status_code == 500
                assert server.idle()
                assert server.http.get("/health").status_code == 503
        assert server.chat().status_code == 200
        assert server.http.get("/health").status_code == 200


def held_up(server: Any, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Have the server's preparation of prompts wait for an event."""
    may, prepare = threading.Event(), server.service._preparer.chat

    def wait(body: Any) -> Any:
        may.wait(10)
        return prepare(body)

    monkeypatch.setattr(server.service._preparer, "chat", wait)
    return may


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_prepared_has_a_place_and_a_deadline(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    with serve(max_seqs=1, max_queue=0, deadline_s=0.5) as server:
        may = held_up(server, monkeypatch)
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(server.chat(stream=stream)))
        thread.start()
        while not server.service._places:
            time.sleep(0.01)
        assert server.chat().status_code == 429
        thread.join()
        assert answers[0].status_code == 504
        assert server.idle()
        may.set()
        assert server.chat().status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_its_prompt_is_prepared(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    with serve() as server:
        may = held_up(server, monkeypatch)
        with pytest.raises(httpx2.ReadTimeout):
            server.http.post(CHAT, json=LONG | {"stream": stream}, timeout=0.2)
        assert server.idle()
        may.set()
        assert server.chat().status_code == 200


def test_shutdown_waits_for_a_prompt_that_is_prepared(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Any] = []
    with serve() as server:
        may = held_up(server, monkeypatch)
        body = {"messages": MESSAGES, "max_tokens": 12}
        thread = threading.Thread(target=lambda: answers.append(httpx2.post(server.url + CHAT, json=body)))
        thread.start()
        while not server.service._places:
            time.sleep(0.01)
        threading.Timer(0.3, may.set).start()
    thread.join()
    assert answers[0].status_code == 200


def test_a_prompt_that_never_fits_is_not_read_whole(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    tokenizer = server.service._preparer._tokenizer
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **o: read.append(len(text)) or encode(text, **o))
    long = "the cat sat on the mat. " * 100_000
    bodies: list[tuple[str, Any]] = [
        (CHAT, {"messages": [{"role": "user", "content": long}]}),
        ("/v1/completions", {"prompt": ["the cat", long]}),
    ]
    for path, body in bodies:
        answer = server.post(path, body)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert "at most 2048 fit" in answer.json()["error"]["message"]
    assert max(read) < 200_000


def test_a_fault_within_a_stream_ends_it(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, output: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Choice, "take", broken)
    with server.http.stream("POST", CHAT, json=LONG | {"stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    assert "has a bug" in json.loads(lines[-2].removeprefix("data: "))["error"]["message"]
    assert lines[-1] == "data: [DONE]"


def test_draining_waits_for_what_joins_in() -> None:
    async def drained() -> list[str]:
        ended, active = [], set()

        async def answer(name: str, then: str) -> None:
            active.add(asyncio.current_task())
            await asyncio.sleep(0.05)
            if then:
                joining.append(asyncio.create_task(answer(then, "")))
            await asyncio.sleep(0.05)
            active.discard(asyncio.current_task())
            ended.append(name)

        joining = [asyncio.create_task(answer("first", "second"))]
        await asyncio.sleep(0.02)
        service: Any = SimpleNamespace(_active=active, draining=False)
        await Service.drain(service, 5.0)
        await asyncio.gather(*joining, return_exceptions=True)
        return ended

    assert asyncio.run(drained()) == ["first", "second"]


@pytest.mark.parametrize(("grace", "tokens", "ending"), [(30.0, 150, "length"), (0.0, 1500, "shutdown")])
def test_shutdown_finishes_streams_or_ends_them_cleanly(
    serve: Callable[..., Any], grace: float, tokens: int, ending: str
) -> None:
    lines: list[str] = []

    def read(url: str) -> None:
        with httpx2.stream(
            "POST", url + CHAT, json=LONG | {"stream": True, "max_tokens": tokens}
        ) as response:
            lines.extend(line for line in response.iter_lines() if line)

    with serve(grace_s=grace) as server:
        reader = threading.Thread(target=read, args=(server.url,))
        reader.start()
        while not lines:
            time.sleep(0.005)
    reader.join()
    assert lines.pop() == "data: [DONE]"
    last = json.loads(lines.pop().removeprefix("data: "))
    assert ending == (last["error"]["code"] if "error" in last else last["choices"][0]["finish_reason"])


def test_other_origins_are_off_unless_named(server: Any, serve: Callable[..., Any]) -> None:
    ask = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in server.http.options(CHAT, headers=ask).headers
    with serve(cors_origins=("https://a.example",), api_keys=("key",)) as open_one:
        refused = open_one.http.post(CHAT, json={}, headers={"origin": "https://a.example"})
        assert refused.status_code == 401
        for answer in (open_one.http.options(CHAT, headers=ask), refused):
            assert answer.headers["access-control-allow-origin"] == "https://a.example"
