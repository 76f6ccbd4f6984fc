"""A tool call is told in pieces that together are the call, however its text arrives."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from foredraft.server.answers import Choice
from foredraft.server.calls import GrowingCall
from foredraft.server.grammar import CALL_BEGIN, CALL_END

plain = st.text(alphabet='ab"\\{}[]\n', max_size=6)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | plain,
    lambda some: st.lists(some, max_size=3) | st.dictionaries(plain, some, max_size=3),
    max_leaves=8,
)


def texts(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % len(text) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(places)]


@given(name=plain, arguments=st.dictionaries(plain, values, max_size=3), cuts=st.lists(st.integers(0, 500)))
def test_the_pieces_are_the_call(name: str, arguments: dict[str, Any], cuts: list[int]) -> None:
    body = json.dumps({"name": name, "arguments": arguments}, indent=1)
    call, told = GrowingCall(), []
    for text in texts(CALL_BEGIN + body + CALL_END, cuts):
        piece = call.take(text)
        if piece is not None:
            told.append(piece)
    assert call.closed
    assert told[0]["id"] == call.id
    assert told[0]["function"]["name"] == name
    assert all("id" not in piece and piece["function"]["arguments"] for piece in told[1:])
    whole = "".join(piece["function"]["arguments"] for piece in told)
    assert whole == call.said["function"]["arguments"]
    assert json.loads(whole) == arguments


@given(
    pieces=st.lists(st.sampled_from(["<tool_", "<tool_call>", "call>", "\n", "<", "x"]), max_size=6),
    called=st.booleans(),
    cuts=st.lists(st.integers(0, 500)),
)
def test_text_before_a_call_is_shown(pieces: list[str], called: bool, cuts: list[int]) -> None:
    before = "".join(pieces).split(CALL_BEGIN)[0]
    call = CALL_BEGIN + '{"name": "move", "arguments": {"x": "<tool_call>"}}' + CALL_END
    if (before + call).find(CALL_BEGIN) != len(before):
        return  # what ends with the beginning of a call and goes on with a call
    choice: Any = Choice(0, None, chat=True, may_call=True)  # type: ignore[arg-type]
    shown, told = "", []
    for text in [*texts(before + call if called else before + " ", cuts), ""]:
        choice.finish = None if text else "stop"
        some, piece = choice._told(text)
        shown += some
        told += [piece] if piece else []
        assert not choice.held or CALL_BEGIN.startswith(choice.held)
    assert shown == (before if called else before + " ")
    assert "".join(piece["function"]["arguments"] for piece in told) == '{"x": "<tool_call>"}' * called
    assert choice.finish == ("tool_calls" if called else "stop")


def test_a_call_that_is_cut_tells_what_it_has() -> None:
    call = GrowingCall()
    assert call.take(CALL_BEGIN + '{"name": "mo') is None
    assert call.take('ve", "arguments": {"x": ') == {
        "index": 0,
        "id": call.id,
        "type": "function",
        "function": {"name": "move", "arguments": '{"x": '},
    }
    assert not call.closed
    assert call.said["function"] == {"name": "move", "arguments": '{"x": '}
