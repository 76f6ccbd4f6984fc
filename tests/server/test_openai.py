"""OpenAI's own client against the server: what it may call, and that the answers are those of the engine."""

from __future__ import annotations

import copy
import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from foredraft import LLM, SamplingParams
from foredraft.errors import ConfigError
from foredraft.server.answers import Choice, TokenTexts
from foredraft.server.errors import ApiError
from foredraft.server.grammar import CALL_BEGIN, CALL_END, GrammarMaker
from foredraft.server.prompts import Preparer
from foredraft.server.schemas import ChatRequest, CompletionRequest
from foredraft.types import SpecStats, StepOutput, TokenLogprob
from tiny_tokenizers import TEMPLATE, byte_level

MESSAGES: Any = [{"role": "user", "content": "the cat sat on the mat, the cat"}]
GREEDY: Any = {"model": "tiny", "temperature": 0, "max_tokens": 24}
POINT: Any = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}, "ok": {"type": "boolean"}},
    "required": ["x", "ok"],
    "additionalProperties": False,
}


class Answer(BaseModel):
    ok: bool


TOOL: Any = {"type": "function", "function": {"name": "move", "description": "Go.", "parameters": POINT}}


@pytest.fixture(scope="module")
def offline(model: Any) -> LLM:
    return LLM(model)


def test_a_chat_answer_is_the_engines(server: Any, offline: LLM) -> None:
    answer = server.openai.chat.completions.create(messages=MESSAGES, **GREEDY)
    expected = offline.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=24))
    choice = answer.choices[0]
    assert choice.message.content == expected.text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == expected.finish_reason
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.object == "chat.completion"


def test_a_text_answer_is_the_engines(server: Any, offline: LLM) -> None:
    answer = server.openai.completions.create(prompt=["the cat", "END end."], **GREEDY)
    expected = offline.generate(["the cat", "END end."], SamplingParams(temperature=0, max_tokens=24))
    assert [choice.text for choice in answer.choices] == [one.text for one in expected]
    assert answer.usage.completion_tokens == sum(len(one.token_ids) for one in expected)
    ids = server.openai.completions.create(prompt=offline.tokenizer.encode("the cat"), **GREEDY)
    assert ids.choices[0].text == expected[0].text


def test_chunks_make_the_whole_answer(server: Any) -> None:
    whole = server.openai.chat.completions.create(messages=MESSAGES, **GREEDY)
    chunks = list(
        server.openai.chat.completions.create(
            messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    deltas = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in deltas) == whole.choices[0].message.content
    assert deltas[0].delta.role == "assistant"
    assert [choice.finish_reason for choice in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage
    assert not chunks[-1].choices
    assert len({chunk.id for chunk in chunks}) == 1

    assert [chunk.usage for chunk in chunks[:-1]] == [None] * len(deltas)
    assert all("usage" in chunk.model_fields_set for chunk in chunks)


@pytest.mark.parametrize(
    "ask",
    [
        {"messages": MESSAGES},
        {"messages": MESSAGES, "n": 3, "temperature": 1, "seed": 7},
        {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", "seed": 1, "max_tokens": 600},
        {"prompt": "the cat"},
        {"prompt": ["the cat sat on the mat, the cat", "END end."], "stream_options": {}},
    ],
)
def test_the_last_chunk_of_a_choice_has_the_figures(server: Any, ask: Any) -> None:
    create = (server.openai.chat.completions if "messages" in ask else server.openai.completions).create
    chunks = list(create(stream=True, **GREEDY | ask))
    whole = create(**{name: value for name, value in (GREEDY | ask).items() if name != "stream_options"})
    assert all(len(chunk.choices) == 1 for chunk in chunks)
    assert sum(chunk.choices[0].finish_reason is not None for chunk in chunks) == len(whole.choices)
    assert chunks[-1].choices[0].finish_reason
    assert chunks[-1].usage == whole.usage
    counts = ("steps", "drafted", "levels", "accepted", "emitted", "accepted_at")
    told, expected = chunks[-1].metrics["foredraft"], whole.metrics["foredraft"]
    assert [told[name] for name in counts] == [expected[name] for name in counts]
    assert chunks[-1].metrics["speculative_decoding"] == whole.metrics["speculative_decoding"]
    for chunk in chunks[:-1]:
        assert not {"usage", "metrics"} & chunk.model_fields_set


def test_a_stream_may_be_without_figures(server: Any) -> None:
    chunks = server.openai.chat.completions.create(
        messages=MESSAGES, stream=True, stream_options={"include_usage": False}, **GREEDY
    )
    assert not any({"usage", "metrics"} & chunk.model_fields_set for chunk in chunks)


def test_text_chunks_make_the_whole_answer(server: Any) -> None:
    whole = server.openai.completions.create(prompt="the cat", **GREEDY)
    chunks = server.openai.completions.create(prompt="the cat", stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def test_n_answers_have_seeds_that_follow(server: Any) -> None:
    ask: Any = {
        "model": "tiny",
        "messages": MESSAGES,
        "max_tokens": 12,
        "extra_body": {"foredraft": {"reproducible": True}},
    }
    three = server.openai.chat.completions.create(n=3, seed=7, **ask)
    texts = [choice.message.content for choice in three.choices]
    assert texts[2] == server.openai.chat.completions.create(seed=9, **ask).choices[0].message.content
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    chunks = server.openai.chat.completions.create(n=3, seed=7, stream=True, **ask)
    streamed = ["", "", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_chat(server: Any, offline: LLM, stream: bool) -> None:
    answer = server.openai.chat.completions.create(
        messages=MESSAGES, logprobs=True, top_logprobs=3, stream=stream, **GREEDY
    )
    if stream:
        parts = [chunk.choices[0].logprobs for chunk in answer if chunk.choices]
        entries = [entry for part in parts if part for entry in part.content]
    else:
        entries = answer.choices[0].logprobs.content
    expected = offline.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=24, logprobs=3))
    assert expected.logprobs is not None
    assert [e.logprob for e in entries] == pytest.approx([e.logprob for e in expected.logprobs], abs=1e-4)
    assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in entries)
    said = b"".join(bytes(entry.bytes) for entry in entries).decode("utf-8", "replace")
    assert said.removesuffix("</s>") == expected.text


@pytest.mark.parametrize("count", [0, 2])
def test_logprobs_of_text(server: Any, count: int) -> None:
    ask: Any = {"model": "tiny", "prompt": "the cat", "logprobs": count, "seed": 2, "max_tokens": 60}
    choice = server.openai.completions.create(**ask).choices[0]
    told = choice.logprobs
    seen = set()
    for token, logprob, top, offset in zip(
        told.tokens, told.token_logprobs, told.top_logprobs, told.text_offset, strict=True
    ):
        assert top[token] == logprob
        assert len(top) in ((1,) if count == 0 else (2, 3))
        seen.add(len(top))
        if not token.startswith("bytes:"):
            assert choice.text[offset:].startswith(token.removesuffix("</s>"))
    assert seen == ({1} if count == 0 else {2, 3})
    chunks = [chunk.choices[0].logprobs for chunk in server.openai.completions.create(stream=True, **ask)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [one for chunk in chunks for one in getattr(chunk, name)] == getattr(told, name)


def test_text_offsets_count_characters() -> None:
    tokenizer = byte_level()
    text = "a🙂éb"
    tokens = [(token, place) for place, char in enumerate(text) for token in tokenizer.encode(char)]
    ids = [*(token for token, _ in tokens), 1]
    choice = Choice(0, TokenTexts(tokenizer), chat=False)
    entries = [TokenLogprob(token, -1.0, ((ids[0], -0.5),)) for token in ids]
    choice.take(StepOutput("r", ids, "b" * len(ids), entries, text, "stop", SpecStats()))
    told = choice.whole()["logprobs"]
    assert told["text_offset"] == [*(place for _, place in tokens), len(text)]
    assert told["tokens"][1].startswith("bytes:\\xf0")
    assert [told["tokens"][0], *told["tokens"][-2:]] == ["a", "b", "</s>"]
    assert [told["top_logprobs"][0], told["top_logprobs"][-2]] == [{"a": -1.0}, {"b": -1.0, "a": -0.5}]


def test_stop_seed_and_bias(server: Any) -> None:
    whole = server.openai.completions.create(prompt="the cat", **GREEDY).choices[0].text
    stop = whole[4:6]
    cut = server.openai.completions.create(prompt="the cat", stop=[stop, "never"], **GREEDY).choices[0]
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"
    biased = (
        server.openai.completions.create(prompt="the cat", logit_bias={"40": 100}, **GREEDY).choices[0].text
    )
    assert biased != whole
    ask: Any = {"model": "tiny", "prompt": "the cat", "seed": 3, "max_tokens": 8}
    seeded = [server.openai.completions.create(**ask).choices[0].text for _ in range(2)]
    assert seeded[0] == seeded[1]


ENDS = {"": {"stop"}, "none": {"stop"}, "auto": {"stop", "tool_calls"}, "required": {"tool_calls"}}


@pytest.mark.parametrize("choice", ENDS)
def test_an_answer_follows_a_schema(server: Any, choice: str) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT, "strict": True}}
    tools = {"tools": [TOOL], "tool_choice": choice} if choice else {}
    done = []
    for seed in range(5):
        answer = server.openai.chat.completions.create(
            model="tiny", messages=MESSAGES, response_format=form, seed=seed, max_tokens=400, **tools
        )
        message, finish = answer.choices[0].message, answer.choices[0].finish_reason
        if finish != "length":
            called = [call.function.arguments for call in message.tool_calls or ()]
            done.append(finish)
            point = json.loads(*called or [message.content])
            assert set(point) == {"x", "ok"}
            assert point["x"] in range(10)
    assert set(done) == ENDS[choice]


def test_an_answer_is_an_object(server: Any) -> None:
    answers = [
        server.openai.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            response_format={"type": "json_object"},
            seed=seed,
            max_tokens=300,
        ).choices[0]
        for seed in range(4)
    ]
    assert all(choice.message.content.lstrip().startswith("{") for choice in answers)
    done = [json.loads(choice.message.content) for choice in answers if choice.finish_reason == "stop"]
    assert all(isinstance(value, dict) for value in done)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "move"}}, "auto"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called(server: Any, choice: Any, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    before = None
    if choice == "auto":  # the model would not call by itself
        before, maker = "Let me <tool_\n", server.service._preparer._grammars
        rules = f"start: {json.dumps(before + CALL_BEGIN)} call {json.dumps(CALL_END)}\ncall: %json "
        monkeypatch.setattr(maker, "calls", lambda schema, **_: maker._made(rules + json.dumps(schema)))
    answer = server.openai.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice=choice,
        seed=1,
        max_tokens=600,
        stream=stream,
    )
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        told = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
        assert len(told) > 2  # its arguments come as they are written
        assert [call.index for call in told] == [0] * len(told)
        assert told[0].id.startswith("call_")
        assert all(call.id is call.function.name is None for call in told[1:])
        told[0].function.arguments = "".join(call.function.arguments for call in told)
        content = "".join(chunk.delta.content or "" for chunk in chunks) or None
        calls, finish = told[:1], chunks[-1].finish_reason
    else:
        message, finish = answer.choices[0].message, answer.choices[0].finish_reason
        calls, content = message.tool_calls, message.content
    assert finish == "tool_calls"
    assert content == before
    assert calls[0].function.name == "move"
    assert set(json.loads(calls[0].function.arguments)) == {"x", "ok"}


def test_tools_may_be_left_alone_and_their_results_told(server: Any) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "move", "arguments": '{"x": 1, "ok": true}'},
    }
    messages: Any = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "moved"},
    ]
    for choice in ("none", "auto"):
        answer = server.openai.chat.completions.create(
            messages=messages, tools=[TOOL], tool_choice=choice, **GREEDY
        )
        assert answer.choices[0].message.content
        assert answer.choices[0].finish_reason in ("stop", "length")


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the client about what it parsed
def test_an_answer_may_be_sent_back(server: Any) -> None:
    said = server.openai.chat.completions.create(messages=MESSAGES, **GREEDY).choices[0].message
    called = server.openai.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=[TOOL], tool_choice="required", seed=1, max_tokens=600
    ).choices[0]
    result = {"role": "tool", "tool_call_id": called.message.tool_calls[0].id, "content": "moved"}
    for turns in (
        [said, MESSAGES[0]],
        [said.model_dump(), MESSAGES[0]],
        [said.model_dump() | {"annotations": []}, MESSAGES[0]],
        [called.message, result],
        [called.message.model_dump(), result],
    ):
        assert server.openai.chat.completions.create(messages=[*MESSAGES, *turns], **GREEDY).choices
    parsed: Any = {"model": "tiny", "messages": MESSAGES, "seed": 1, "max_tokens": 600}
    tools: Any = [{"type": "function", "function": TOOL["function"] | {"strict": True}}]
    asks: Any = [{"response_format": Answer}, {"tools": tools, "tool_choice": "required"}]
    for ask in asks:
        whole = server.openai.chat.completions.parse(**parsed, **ask)
        with server.openai.chat.completions.stream(**parsed, **ask) as stream:
            streamed = stream.get_final_completion()
        for message in (whole.choices[0].message, streamed.choices[0].message):
            assert message.parsed or message.tool_calls[0].function.parsed_arguments
            for turn in (message, message.model_dump()):
                turns = [*MESSAGES, turn, result if message.tool_calls else MESSAGES[0]]
                assert server.openai.chat.completions.create(messages=turns, **GREEDY).choices
    with pytest.raises(openai.BadRequestError, match=r"messages\.1\.refusal"):
        server.openai.chat.completions.create(
            messages=[*MESSAGES, said.model_dump() | {"refusal": "no"}], **GREEDY
        )


def test_arguments_are_an_object_whatever_the_schema_leaves_out(server: Any) -> None:
    def ask(parameters: Any) -> Any:
        tool = {"type": "function", "function": {"name": "move", "parameters": parameters}}
        return server.openai.chat.completions.create(
            model="tiny", messages=MESSAGES, tools=[tool], tool_choice="required", seed=1, max_tokens=600
        ).choices[0]

    untyped = {key: value for key, value in POINT.items() if key != "type"}
    choice = ask(untyped)
    assert choice.finish_reason == "tool_calls"
    assert set(json.loads(choice.message.tool_calls[0].function.arguments)) == {"x", "ok"}
    with pytest.raises(openai.BadRequestError, match="move have type 'string'") as refused:
        ask({"type": "string"})
    assert refused.value.param == "tools"


def test_models_and_errors(server: Any) -> None:
    assert [model.id for model in server.openai.models.list()] == ["tiny"]
    assert server.openai.models.retrieve("tiny") == server.openai.models.list().data[0]
    with pytest.raises(openai.NotFoundError, match="'org/gpt-9' does not exist") as unknown:
        server.openai.models.retrieve("org/gpt-9")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="'gpt-9' does not exist"):
        server.openai.chat.completions.create(model="gpt-9", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="store is not supported"):
        server.openai.chat.completions.create(model="tiny", messages=MESSAGES, store=True)


NATIVE = (
    "{% if tools %}[{% for t in tools %}{{ t.function.name }};{% endfor %}]{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function.name }}={{ c.function.arguments.x }}\n"
    "</tool_call>{% endfor %}|{% endfor %}"
)


def make_preparer(template: str, *, max_len: int = 512, max_tokens: int | None = None) -> Preparer:
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.chat_template = template
    grammars = GrammarMaker(tokenizer, len(tokenizer), frozenset({1}))
    return Preparer(tokenizer, grammars, max_len=max_len, max_tokens=max_tokens)


def test_templates_that_know_tools_are_told_of_them() -> None:
    preparer = make_preparer(NATIVE)
    call = {"id": "1", "type": "function", "function": {"name": "move", "arguments": '{"x": 1}'}}
    body = {
        "messages": [
            {"role": "developer", "content": "do"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "moved"},
        ],
        "tools": [TOOL],
    }
    (asked,) = preparer.chat(ChatRequest.model_validate(body)).asked
    said = byte_level().decode(asked.prompt)
    assert said == "[move;]system:do|assistant:<tool_call>\nmove=1\n</tool_call>|tool:moved|"
    body["messages"] = [{"role": "assistant", "content": None}]
    with pytest.raises(ApiError, match="no content"):
        preparer.chat(ChatRequest.model_validate(body))


@pytest.mark.parametrize("arguments", ["", "5", '["x"]', '{"x": 1', "[" * 100_000])
def test_arguments_that_are_no_object_are_told_as_they_are(arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "move", "arguments": arguments}}
    body = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
    for template, told in (
        (NATIVE.replace("arguments.x", "arguments"), f"move={arguments}\n"),
        (TEMPLATE, json.dumps({"name": "move", "arguments": arguments})),
    ):
        (asked,) = make_preparer(template, max_len=200_000).chat(ChatRequest.model_validate(body)).asked
        assert told in byte_level().decode(asked.prompt)


def test_arguments_that_a_template_cannot_write_are_refused() -> None:
    deep = {"name": "move", "arguments": '{"x":' * 700 + "1" + "}" * 700}
    turn = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": deep}]}
    preparer = make_preparer(NATIVE.replace("arguments.x", "arguments | tojson"))
    with pytest.raises(ConfigError, match="do not fit the model's chat template"):
        preparer.chat(ChatRequest.model_validate({"messages": [turn]}))


def test_templates_that_know_neither_system_nor_tools() -> None:
    alternating = (
        "{% for m in messages %}{% if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate user and assistant') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "move", "arguments": '{"x": 1}'}}
    body = {
        "messages": [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": None, "tool_calls": [call, call]},
            {"role": "tool", "tool_call_id": "1", "content": "moved"},
            {"role": "tool", "tool_call_id": "1", "content": "again"},
            {"role": "user", "content": "thanks"},
        ],
        "tools": [TOOL],
    }
    (asked,) = make_preparer(alternating, max_len=4096).chat(ChatRequest.model_validate(body)).asked
    said = byte_level().decode(asked.prompt)
    assert said.startswith("<user>You can call these functions")
    assert said.split("<assistant>")[0].endswith("</tool_call>\n\ngo")
    assert said.endswith(
        "<user><tool_response>\nmoved\n</tool_response>\n<tool_response>\nagain\n</tool_response>\nthanks"
    )
    body["messages"] = [{"role": "system", "content": "be brief"}, *body["messages"]]  # type: ignore[misc]
    with pytest.raises(ConfigError, match="roles must alternate"):
        make_preparer(alternating, max_len=4096).chat(ChatRequest.model_validate(body))
    first = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    shown = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    with pytest.raises(ConfigError, match="no system"):
        make_preparer(first + shown, max_len=4096).chat(ChatRequest.model_validate(body))


@pytest.mark.parametrize("tools", ["", "{% if tools %}<tool_call>{% endif %}"])
def test_a_template_sees_names(tools: str) -> None:
    said = "{% for m in messages %}{{ m.role }} {{ m.name or '-' }}:{{ m.content }}|{% endfor %}"
    body = {"messages": [{"role": "user", "name": "tom", "content": "hi"}, {"role": "user", "content": "ho"}]}
    (asked,) = make_preparer(tools + said).chat(ChatRequest.model_validate(body)).asked
    assert byte_level().decode(asked.prompt) == "user tom:hi|user -:ho|"


def test_what_is_no_unicode_is_refused_whatever_the_template() -> None:
    for parameters in ({"type": "object", "properties": {"x": {"const": "\ud800"}}}, {"title": "\ud800"}):
        tool = {"type": "function", "function": {"name": "move", "parameters": parameters}}
        body = ChatRequest.model_validate({"messages": MESSAGES, "tools": [tool]})
        for template in (NATIVE.replace("t.function.name", "t.function | tojson"), TEMPLATE):
            with pytest.raises((ApiError, ConfigError)):
                make_preparer(template).chat(body)


def longest(preparer: Preparer, **body: Any) -> list[int]:
    if "messages" in body:
        return [one.params.max_tokens for one in preparer.chat(ChatRequest.model_validate(body)).asked]
    asked = preparer.completion(CompletionRequest.model_validate(body)).asked
    return [one.params.max_tokens for one in asked]


def test_each_prompt_has_the_room_that_its_own_context_leaves(server: Any) -> None:
    assert longest(make_preparer(NATIVE, max_len=64), prompt=[[5] * 60, [5]], max_tokens=40) == [40, 40]
    answer = server.openai.completions.create(
        model="tiny", prompt=[[5] * 2040, [5]], max_tokens=20, temperature=0, extra_body={"ignore_eos": True}
    )
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert 20 < answer.usage.completion_tokens < 40


def test_a_limit_that_was_not_asked_for_refuses_nothing() -> None:
    free, short = make_preparer(NATIVE, max_len=64), make_preparer(NATIVE, max_tokens=8)
    assert longest(short, prompt="the cat") == longest(short, messages=MESSAGES) == [8]
    assert longest(free, prompt="the cat") == [16]
    assert longest(free, prompt="the cat", min_tokens=20) == [20]
    assert longest(free, messages=MESSAGES, min_tokens=100) == [100]
    for limits in ({"max_tokens": 9}, {"min_tokens": 9}):
        (name,) = limits
        with pytest.raises(ApiError, match=f"{name}=9 is more than this server gives: use 8 or less"):
            longest(short, prompt="the cat", **limits)
