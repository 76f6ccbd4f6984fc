"""Tool calls as their text grows: a name once it is known, then the arguments piece by piece."""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass, field
from typing import Any

from foredraft.server.grammar import CALL_BEGIN

# The grammar lets nothing else begin so, and the name come first.
_NAME = re.compile(
    re.escape(CALL_BEGIN) + r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\S)'
)


@dataclass(slots=True)
class GrowingCall:
    """One tool call. closed: its arguments are whole."""

    text: str = ""
    name: str | None = None
    arguments: str = ""
    closed: bool = False
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")
    _at: int = 0
    _depth: int = 0
    _in_string: bool = False
    _escaped: bool = False

    def take(self, text: str) -> dict[str, Any] | None:
        """Take more of the text; return what a chunk of the stream tells of it, None if that is nothing."""
        self.text += text
        told: dict[str, Any] = {"index": 0}
        if self.name is None:
            found = _NAME.match(self.text)
            if found is None:
                return None
            self.name, self._at = json.loads(found[1]), found.end()
            told |= {"id": self.id, "type": "function"}
        piece = self._piece()
        self.arguments += piece
        if "id" in told:
            return told | {"function": {"name": self.name, "arguments": piece}}
        return told | {"function": {"arguments": piece}} if piece else None

    @property
    def said(self) -> dict[str, Any]:
        """The call as a message has it; its arguments end where an answer was cut."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}

    def _piece(self) -> str:
        """Return what is new of the arguments, which end with the object that they are."""
        start = self._at
        while self._at < len(self.text) and not self.closed:
            char = self.text[self._at]
            self._at += 1
            if self._in_string:
                self._in_string = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                self.closed = self._depth == 0
        return self.text[start : self._at]
