"""From a request to prompts, sampling parameters and a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from foredraft.errors import ConfigError
from foredraft.server.errors import ApiError
from foredraft.server.grammar import CALL_BEGIN, CALL_END, GrammarMaker, MatcherGrammar
from foredraft.server.schemas import (
    CalledFunction,
    ChatRequest,
    CompletionRequest,
    Format,
    JsonObject,
    JsonSchemaFormat,
    Message,
    NamedTool,
    Tool,
)
from foredraft.text import encode_chat, encode_text, shows_system
from foredraft.types import MAX_SEED, SamplingParams

MAX_PROMPTS = 64
_TOOLS = """You can call these functions; each line is one, with a JSON schema of its arguments:
{functions}
To call one, answer with nothing but
<tool_call>
{{"name": "the function's name", "arguments": {{its arguments}}}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class Asked:
    """One answer that the engine is asked for."""

    prompt: list[int]
    params: SamplingParams
    grammar: MatcherGrammar | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """All answers that a request asks for. calls: they may be tool calls."""

    asked: list[Asked]
    prompt_tokens: int
    calls: bool = False


def count_answers(body: ChatRequest | CompletionRequest) -> int:
    """Return how many answers a request asks for; raises ApiError for more than one request may."""
    n = body.n or 1
    if isinstance(body, ChatRequest):
        return n
    prompts = len(_parts(body.prompt))
    if prompts * n > MAX_PROMPTS:
        raise ApiError(400, f"{prompts} prompts and n={n} ask for more than {MAX_PROMPTS} answers")
    return prompts * n


class Preparer:
    """Knows the model's tokenizer and limits. Used by one thread at a time."""

    def __init__(
        self, tokenizer: Any, grammars: GrammarMaker, *, max_len: int, max_tokens: int | None
    ) -> None:
        self._tokenizer, self._grammars = tokenizer, grammars
        self._max_len, self._max_tokens = max_len, max_tokens
        self._system = shows_system(tokenizer)

    def chat(self, body: ChatRequest) -> Prepared:
        """Prepare a chat completion; raises ApiError or a ForedraftError."""
        tools = _tools(body)
        grammar = self._grammar(body, tools)
        prompt = self._prompt(body.messages, tools)
        if body.max_tokens and body.max_completion_tokens and body.max_tokens != body.max_completion_tokens:
            raise ApiError(400, "max_tokens and max_completion_tokens differ: give one", param="max_tokens")
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        limit = self._limit(body.max_completion_tokens or body.max_tokens, body.min_tokens, self._max_len)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        params = _params(body, limit, logprobs)
        return Prepared(_answers([prompt], params, body.n or 1, grammar), len(prompt), bool(tools))

    def _prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Encode a conversation; a template that writes tool calls as they are read here is told of tools."""
        template = str(getattr(self._tokenizer, "chat_template", ""))
        if "tools" in template and CALL_BEGIN.strip() in template:
            known = [_native(index, message) for index, message in enumerate(messages)]
            said = [tool.model_dump(exclude_none=True) for tool in tools]
            return encode_chat(self._tokenizer, known, said, most=self._max_len)
        return encode_chat(self._tokenizer, _messages(messages, tools, self._system), most=self._max_len)

    def completion(self, body: CompletionRequest) -> Prepared:
        """Prepare a text completion; raises ApiError or a ForedraftError."""
        prompts = [
            encode_text(self._tokenizer, part, most=self._max_len) if isinstance(part, str) else list(part)
            for part in _parts(body.prompt)
        ]
        limit = self._limit(body.max_tokens, body.min_tokens, 16)
        params = _params(body, limit, body.logprobs)
        return Prepared(_answers(prompts, params, body.n or 1, None), sum(len(prompt) for prompt in prompts))

    def _limit(self, wanted: int | None, least: int | None, default: int) -> int:
        """Return the longest answer; the engine ends each where its own context does."""
        most = self._max_tokens
        for name, value in (("max_tokens", wanted), ("min_tokens", least)):
            if most is not None and value is not None and value > most:
                raise ApiError(
                    400, f"{name}={value} is more than this server gives: use {most} or less", param=name
                )
        return wanted or max(min(default, most or default), least or 0)

    def _grammar(self, body: ChatRequest, tools: Sequence[Tool]) -> MatcherGrammar | None:
        param, wanted, grammar = "response_format", _wanted(body.response_format), None
        try:
            if wanted is not None:
                grammar = self._grammars.json(wanted)
            if tools:
                param, required = "tools", body.tool_choice not in (None, "auto")
                grammar = self._grammars.calls(_schema(tools), required=required, other=wanted)
        except ConfigError as error:
            raise ApiError(400, str(error), param=param) from error
        return grammar


def _parts(prompt: str | Sequence[Any]) -> Sequence[Any]:
    """Return the prompts of a text completion, each a text or token ids."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    if not prompt:
        raise ApiError(400, "prompt is empty: give a text or token ids", param="prompt")
    return prompt


def _params(body: ChatRequest | CompletionRequest, limit: int, logprobs: int | None) -> SamplingParams:
    for token in body.logit_bias or {}:
        if not re.fullmatch(r"[0-9]{1,9}", token):
            raise ApiError(400, f"logit_bias has the key {token!r}, which is no token id", param="logit_bias")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    return body.params(max_tokens=limit, logprobs=logprobs)


def _answers(
    prompts: Sequence[list[int]], params: SamplingParams, n: int, grammar: MatcherGrammar | None
) -> list[Asked]:
    """Answer i to a request with seed s is what seed s + i gives alone."""
    seeds = [None if params.seed is None else (params.seed + i) % (MAX_SEED + 1) for i in range(n)]
    return [
        Asked(prompt, replace(params, seed=seed), grammar.fork() if grammar is not None else None)
        for prompt in prompts
        for seed in seeds
    ]


def _tools(body: ChatRequest) -> list[Tool]:
    """Return the tools that may be called."""
    tools, choice = body.tools or [], body.tool_choice
    if choice not in (None, "none") and not tools:
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")
    if choice == "none":
        return []
    if choice in (None, "auto", "required"):
        return tools
    assert isinstance(choice, NamedTool)
    named = [tool for tool in tools if tool.function.name == choice.function.name]
    if not named:
        raise ApiError(
            400, f"tool_choice names {choice.function.name!r}, which is not in tools", param="tool_choice"
        )
    return named


def _wanted(form: Format | None) -> dict[str, Any] | None:
    """Return the JSON schema that an answer must fit, None for any text."""
    if isinstance(form, JsonSchemaFormat):
        return form.json_schema.schema_
    return {"type": "object"} if isinstance(form, JsonObject) else None


def _schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """Return the JSON schema of a call to one of the tools."""
    definitions: dict[str, Any] = {}
    calls = []
    for tool in tools:
        name = tool.function.name
        # With an id of its own references within the parameters, as "#", are of them alone.
        arguments = {"type": "object", **(tool.function.parameters or {}), "$id": f"tool:{name}"}
        arguments.pop("$schema", None)
        if name in definitions:
            raise ApiError(400, f"tools has two functions named {name}: rename one", param="tools")
        if (kind := arguments["type"]) != "object":
            raise ApiError(400, f"the parameters of {name} have type {kind!r}: use object", param="tools")
        definitions[name] = arguments
        properties = {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{name}"}}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls, "$defs": definitions}


def _messages(messages: Sequence[Message], tools: Sequence[Tool], system: bool) -> list[dict[str, str]]:
    """Return the conversation as plain texts. Tools are told in the first system message or, where the
    template knows none, in the first turn of the user; their results are turns of the user.
    """
    turns: list[dict[str, str]] = []
    for index, message in enumerate(messages):
        turn = _turn(index, message)
        beside_result = message.role == "tool" or (index and messages[index - 1].role == "tool")
        if beside_result and turns and turn["role"] == turns[-1]["role"] == "user":
            turns[-1]["content"] += f"\n{turn['content']}"  # many templates want the roles to alternate
        else:
            turns.append(turn)
    if tools:
        functions = "\n".join(
            json.dumps(tool.function.model_dump(exclude_none=True, exclude={"strict"})) for tool in tools
        )
        said = _TOOLS.format(functions=functions)
        # A system message of the client's own stays first, so that a template that knows none refuses it.
        role = "system" if system or turns[0]["role"] == "system" else "user"
        if turns[0]["role"] != role:
            turns.insert(0, {"role": role, "content": said})
        elif role == "system":
            turns[0]["content"] += f"\n\n{said}"
        else:
            turns[0]["content"] = f"{said}\n\n{turns[0]['content']}"
    return turns


def _native(index: int, message: Message) -> dict[str, Any]:
    """Return a message as templates know it that know tools."""
    calls = [{"type": "function", "function": _call(c.function)} for c in message.tool_calls or ()]
    said = {"role": _role(message), "content": _text(index, message), **_name(message)}
    return said | {"tool_calls": calls} if calls else said


def _turn(index: int, message: Message) -> dict[str, str]:
    content = _text(index, message)
    if message.tool_calls:
        calls = [f"{CALL_BEGIN}{json.dumps(_call(c.function))}{CALL_END}" for c in message.tool_calls]
        content = "\n".join([content, *calls] if content else calls)
    if message.role == "tool":  # a role that few templates know
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    return {"role": _role(message), "content": content, **_name(message)}


def _text(index: int, message: Message) -> str:
    content = message.content
    if content is None and not message.tool_calls:
        raise ApiError(400, f"messages[{index}] has no content: give a text", param="messages")
    return "".join(part.text for part in content) if isinstance(content, list) else content or ""


def _name(message: Message) -> dict[str, str]:
    return {} if message.name is None else {"name": message.name}


def _role(message: Message) -> str:
    return "system" if message.role == "developer" else message.role


def _call(call: CalledFunction) -> dict[str, Any]:
    """Return a call as templates know it: its arguments are an object, or the text that a model wrote."""
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = None
    return {"name": call.name, "arguments": arguments if isinstance(arguments, dict) else call.arguments}
