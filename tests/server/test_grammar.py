"""A grammar masks target and draft alike: drafted answers are plain ones under the same grammar."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import llguidance
import pytest
import torch
from tokenizers import AddedToken

import tiny_models
from foredraft import LLM, SamplingParams
from foredraft.errors import ConfigError
from foredraft.server.errors import ApiError
from foredraft.server.grammar import CALL_BEGIN, CALL_END, GrammarMaker, MatcherGrammar
from foredraft.server.prompts import _schema
from foredraft.server.schemas import Tool
from tiny_tokenizers import byte_level

SCHEMA: Any = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["cat", "mat"]}, "minItems": 3, "maxItems": 6},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "tags", "n"],
    "additionalProperties": False,
}


def make_tool(name: str, **parameters: Any) -> Tool:
    schema = {"type": "object", "required": ["a"], "additionalProperties": False, **parameters}
    return Tool.model_validate({"type": "function", "function": {"name": name, "parameters": schema}})


GO = make_tool("go", properties={"a": {"type": "integer"}})


@pytest.fixture(scope="module")
def draft(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's weights with noise: a draft model that is often right."""
    path = tmp_path_factory.mktemp("draft")
    byte_level().save_pretrained(path)
    size = len(byte_level())
    tiny_models.build(
        "llama", path, vocab_size=size, bos_token_id=0, eos_token_id=1, max_position_embeddings=2048
    )
    return path


def _run(llm: LLM, params: SamplingParams) -> tuple[list[int], int]:
    target = llm.engine.target
    grammar = GrammarMaker(llm.tokenizer, target.vocab_size, target.eos_ids).json(SCHEMA)
    llm.engine.add(llm.tokenizer.encode("the cat sat on the mat"), params, "r", grammar=grammar)
    tokens: list[int] = []
    accepted = 0
    while llm.engine.has_work:
        for output in llm.engine.step():
            tokens += output.token_ids
            accepted = output.stats.accepted
    assert not grammar.error
    return tokens, accepted


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 1.3, "seed": 5, "reproducible": True}]
)
@pytest.mark.parametrize("kind", ["ngram", "chain", "tree"])
def test_drafts_change_no_structured_answer(model: Path, draft: Path, kind: str, sampling: Any) -> None:
    params = SamplingParams(max_tokens=400, **sampling)
    plain, none = _run(LLM(model, kv_gb=0.02), params)
    named = "ngram" if kind == "ngram" else draft
    llm = LLM(model, named, kv_gb=0.04, budget=6, tree=(3, 2, 1) if kind == "tree" else None)
    drafted, accepted = _run(llm, params)
    assert drafted == plain
    assert _run(llm, SamplingParams(max_tokens=400, budget=0, **sampling))[0] == plain
    assert none == 0
    assert accepted > 0
    value = json.loads(llm.tokenizer.decode(plain, skip_special_tokens=True))
    assert set(value) == {"name", "tags", "n"}


def test_sampled_drafts_keep_the_grammar(model: Path, draft: Path) -> None:
    llm = LLM(model, draft, kv_gb=0.04, budget=4)
    for seed in range(4):
        tokens, _ = _run(llm, SamplingParams(max_tokens=400, seed=seed, top_p=0.9))
        assert set(json.loads(llm.tokenizer.decode(tokens, skip_special_tokens=True))) == {
            "name",
            "tags",
            "n",
        }


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda maker: maker.json(SCHEMA), '{"name": "cat"'),
        (lambda maker: maker.calls(_schema([GO]), required=False), 'a<tool_call>\n{"name": "'),
    ],
    ids=["json", "text, then a call"],
)
def test_masks_of_a_tree_are_those_of_its_paths(make: Any, text: str) -> None:
    tokenizer = byte_level()
    maker = GrammarMaker(tokenizer, len(tokenizer), frozenset({1}))
    grammar = make(maker)
    good = tokenizer.encode(text, add_special_tokens=False)
    wrong = [*good, 7]
    paths = [[], good[:1], good[:4], wrong, good[:-2], good, [1]]
    rows = grammar.allowed(paths)
    for path, row in zip(paths, rows, strict=True):
        fresh = make(maker)
        if path in (wrong, [1]):
            assert row.all()
            continue
        fresh.advance(path)
        assert torch.equal(fresh.allowed([[]])[0], row)
    assert torch.equal(grammar.allowed(paths), rows)


@pytest.mark.parametrize(
    ("limits", "end"),
    [
        ({}, None),
        ({"max_items_in_row": 2}, 27),
        ({"max_items_in_row": 4}, 32),
        ({"step_max_items": 10}, 31),
        ({"step_lexer_fuel": 1000}, 11),
        ({"step_lexer_fuel": 1650}, None),
        ({"max_lexer_states": 100}, 23),
        ({"max_lexer_states": 120}, None),
    ],
    ids=str,
)
def test_a_limit_ends_an_answer_only_if_it_is_reached_by_what_was_emitted(
    limits: dict[str, int], end: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was guessed, and whatever another answer to the request has come to."""
    tokenizer = byte_level()
    maker = GrammarMaker(tokenizer, len(tokenizer), frozenset({1}))
    spoken = '{"name": "cat", "tags": ["cat", "mat", "cat"], "n": 5}'
    text = tokenizer.encode(spoken, add_special_tokens=False)
    make = llguidance.LLMatcher
    limited: Any = partial(make, limits=llguidance.LLParserLimits(**limits))
    limited.grammar_from_json_schema = make.grammar_from_json_schema
    monkeypatch.setattr(llguidance, "LLMatcher", limited)
    plain = maker.json(SCHEMA)
    wanted = []
    for token in text:
        wanted.append(plain.allowed([[]])[0])
        if plain.error:
            break
        plain.advance([token])
    assert (len(wanted) - 1 if plain.error else None) == end
    guessing = maker.json(SCHEMA)
    other = guessing.fork()
    for place in range(len(wanted)):
        paths = [text[place : place + count] for count in range(12)]
        for grammar in (guessing, other):
            rows = grammar.allowed([*paths, []])
            assert torch.equal(rows[-1], rows[0])
            for row, said in zip(rows[:-1], wanted[place:], strict=False):
                assert torch.equal(row, said)
            assert bool(grammar.error) == (place == end)
        guessing.advance(text[place : place + 1])
        other.advance(text[place : place + 1])


def accepts(grammar: MatcherGrammar, tokens: list[int]) -> bool:
    walked = grammar.fork()
    for token in tokens:
        if not walked.allowed([[]])[0, token]:
            return False
        walked.advance([token])
    return bool(walked.allowed([[]])[0, 1])


def make_call(name: str, arguments: Any) -> str:
    return f"{CALL_BEGIN}{json.dumps({'name': name, 'arguments': arguments})}{CALL_END}"


@pytest.mark.parametrize("added", [(), ("<tool_call>", "</tool_call>")], ids=["text", "tokens"])
def test_what_may_come_before_a_call_or_instead(added: tuple[str, ...]) -> None:
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.backend_tokenizer.add_tokens([AddedToken(text) for text in added])
    maker, schema = GrammarMaker(tokenizer, len(tokenizer), frozenset({1})), _schema([GO])
    required, free = (maker.calls(schema, required=required) for required in (True, False))
    point = maker.calls(schema, required=False, other={"type": "object", "required": ["x"]})

    def told(text: str) -> list[bool]:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return [accepts(grammar, tokens) for grammar in (required, free, point)]

    call = make_call("go", {"a": 1})
    assert told(call) == [True, True, True]
    assert told(f"<think>\nhm <tool_\n</think>\n\n{call}") == [False, True, False]
    assert told("a <tool_call> is a line") == [False, True, False]
    assert told("") == [False, True, False]
    assert told('{"x": "<tool_call>"}') == [False, True, True]
    for wrong in ("a<tool_call>\nb", call + "more", make_call("go", {"b": 1}), "<s>"):
        assert told(wrong) == [False, False, False]


UNSUPPORTED: Any = [
    {"uniqueItems": True},
    {"not": {"type": "string"}},
    {"if": {"type": "string"}, "then": {"maxLength": 3}},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"contains": {"type": "integer"}},
    {"propertyNames": {"pattern": "a"}},
    {"dependentRequired": {"a": ["b"]}},
    {"unevaluatedProperties": False},
    {"properties": {"a": {}, "b": {}}, "minProperties": 2},
    {"$ref": "https://example.com/schema"},
    {"type": "string", "pattern": "(?=a)b"},
    {"type": "string", "format": "regex"},
]


def test_what_schemas_mean_is_as_documented() -> None:
    tokenizer = byte_level()
    maker = GrammarMaker(tokenizer, len(tokenizer), frozenset({1}))
    for schema in UNSUPPORTED:
        with pytest.raises(ConfigError, match="the JSON schema is not supported: "):
            maker.json(schema)
    one: Any = {"properties": {"a": {"type": "integer"}, "b": {}}}
    for schema, text, fits in (
        (one, '{"a": 1, "c": 2}', True),
        (one, '{"b": 1, "a": 2}', False),
        (one | {"additionalProperties": False}, '{"a": 1, "c": 2}', False),
    ):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert accepts(maker.json({"type": "object", **schema}), tokens) == fits


def test_references_in_the_parameters_of_a_tool_are_its_own() -> None:
    letter, whole = {"x": {"enum": ["p", "q"]}}, {"x": {"type": "integer"}}
    again = {"a": {"$ref": "#/$defs/x"}, "b": {"$ref": "#/properties/a"}}
    named = {"$id": "https://example.com/tool", "$schema": "https://example.com/any"}
    tools = [
        make_tool("tree", properties={"a": whole["x"], "kids": {"type": "array", "items": {"$ref": "#"}}}),
        make_tool("letters", properties=again, **{"$defs": letter}, **named),
        make_tool("numbers", properties=again, **{"$defs": whole}, **named),
    ]
    tokenizer = byte_level()
    grammar = GrammarMaker(tokenizer, len(tokenizer), frozenset({1})).calls(_schema(tools), required=True)

    def fits(name: str, arguments: Any) -> bool:
        return accepts(grammar, tokenizer.encode(make_call(name, arguments), add_special_tokens=False))

    assert fits("tree", {"a": 1, "kids": [{"a": 2}, {"a": 3, "kids": []}]})
    assert not fits("tree", {"a": 1, "kids": [{"b": 2}]})
    assert fits("letters", {"a": "p", "b": "q"})
    assert not fits("letters", {"a": "p", "b": 1})
    assert fits("numbers", {"a": 1, "b": 2})
    assert not fits("numbers", {"a": "p"})
    with pytest.raises(ApiError, match="two functions named tree"):
        _schema([tools[0], tools[0]])
