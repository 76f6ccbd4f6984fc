"""Files of requests: JSONL, one conversation, text or captured request a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foredraft.errors import ConfigError


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ("file:line", object) for every line that is not blank; raises ConfigError naming the line."""
    try:
        # Rows end at "\n" alone: str.splitlines also cuts at U+2028 and others, which JSON strings may hold.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where} is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{where} is no JSON object but {type(row).__name__}")
        yield where, row


def request_body(row: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a row's request, with "messages" or "prompt": the row itself, or what a server captured as
    {"body": …}.

    A last message of the assistant's is left out: the target gives its own. Raises ConfigError.
    """
    body = row.get("body", row)
    messages = body.get("messages") if isinstance(body, dict) else None
    if isinstance(messages, list) and messages:
        last = messages[-1]
        if isinstance(last, dict) and last.get("role") == "assistant":
            messages = messages[:-1]
        return {**body, "messages": messages}
    if isinstance(body, dict) and isinstance(body.get("prompt"), str) and body["prompt"]:
        return dict(body)
    raise ConfigError(f'{where} has neither "messages" (a list) nor "prompt" (a text)')
