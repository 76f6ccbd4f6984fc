"""The requests that are understood. A field that is not here is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from foredraft.types import MAX_SEED, SamplingParams

MAX_N = 16
# What asks for nothing, or for what is done anyway: the values of a field, or their type if all do.
_NEUTRAL: dict[str, list[Any] | type] = {
    "best_of": [1],
    "cache_prompt": bool,
    "echo": [False],
    "function_call": ["none"],
    "functions": [[]],
    "include_stop_str_in_output": [False],
    "length_penalty": [1, 1.0],
    "metadata": dict,
    "modalities": [["text"]],
    "priority": [0],
    "prompt_cache_key": str,
    "safety_identifier": str,
    "seed": [-1],
    "service_tier": ["auto", "default"],
    "skip_special_tokens": [True],
    "spaces_between_special_tokens": [True],
    "store": [False],
    "top_k": [-1],
    "use_beam_search": [False],
}


def _unicode(text: str) -> str:
    """Refuse lone surrogates, which JSON can hold and no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text is no valid Unicode: it has half of a surrogate pair") from None
    return text


Text = Annotated[str, AfterValidator(_unicode)]
Token = Annotated[int, Field(ge=0)]
Stop = Annotated[Text, Field(min_length=1, max_length=1000)]
Ignored = Annotated[Any, Field(exclude=True)]  # accepted, and not captured


class Body(BaseModel):
    """Strict: no unknown field, no number in a string, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


def _neutral(name: str, value: Any) -> bool:
    known = _NEUTRAL.get(name, [])
    if isinstance(known, type):
        return isinstance(value, known)
    return any(type(value) is type(each) and value == each for each in known)


class Foredraft(Body):
    """Our own part of a request. trace: chunks also say where each token came from."""

    budget: Annotated[int, Field(ge=0, le=256)] | Literal["auto"] = "auto"
    reproducible: bool = False
    trace: bool = False


class StreamOptions(Body):
    """include_usage: true, a chunk without choices tells usage and metrics at the end; false, none does; not
    given, the last chunk with a choice does.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # there never is any


class Sampling(Body):
    """What chat and text completions share; defaults are those of SamplingParams, null is the default."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    foredraft: Foredraft = Foredraft()

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_asks_for_nothing(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {
            name: value
            for name, value in body.items()
            if not _neutral(name, value) and (value is not None or name in cls.model_fields)
        }

    def params(self, *, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """Return the sampling parameters; raises ConfigError."""
        same = (
            "temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty seed "
            "min_tokens ignore_eos"
        )
        given = {name: getattr(self, name) for name in same.split() if getattr(self, name) is not None}
        return SamplingParams(
            **given,
            max_tokens=max_tokens,
            logprobs=logprobs,
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            budget=self.foredraft.budget,
            reproducible=self.foredraft.reproducible,
        )


class TextPart(Body):
    """A part of a message; only text is understood."""

    type: Literal["text"]
    text: Text

    @field_validator("type", mode="before")
    @classmethod
    def _only_text(cls, kind: Any) -> Any:
        if isinstance(kind, str) and kind != "text":
            raise ValueError(f"only text parts are understood, not {kind[:40]}")
        return kind


class CalledFunction(Body):
    """A call as an earlier answer made it; arguments is JSON in a string."""

    name: Text
    arguments: Text
    parsed_arguments: Ignored = None


class ToolCall(Body):
    """An earlier answer's call."""

    id: str
    type: Literal["function"]
    function: CalledFunction
    index: Ignored = None


class Message(Body):
    """One turn of a conversation."""

    role: Annotated[Text, Field(min_length=1, max_length=64)]
    content: Text | list[TextPart] | None = None
    name: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=64)] | None = None
    tool_call_id: str | None = None
    # OpenAI's clients send an answer back with all of its fields, and what they made of it themselves.
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    parsed: Ignored = None


class Function(Body):
    """A function that the model may call; parameters is a JSON schema."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool; only functions are understood."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """The function that must be called."""

    name: str


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class PlainText(Body):
    """No format."""

    type: Literal["text"]


class JsonObject(Body):
    """Some JSON object."""

    type: Literal["json_object"]


class JsonSchema(Body):
    """A schema and its name. It is always followed to the letter, strict or not."""

    name: Annotated[str, Field(max_length=256)]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class JsonSchemaFormat(Body):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


Format = Annotated[PlainText | JsonObject | JsonSchemaFormat, Field(discriminator="type")]


class ChatRequest(Sampling):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: Format | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(Sampling):
    """Body of POST /v1/completions."""

    prompt: Text | list[Text] | list[Token] | list[list[Token]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
