"""Files of requests: JSONL, one conversation, text or captured request a line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foredraft.errors import ConfigError


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ("file:line", object) for every line that is not blank; raises ConfigError naming the line."""
    try:
        # Rows end at "\n" alone: str.splitlines also cuts at U+2028 and others, which JSON strings may hold.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_float=_finite, parse_constant=_finite)
        except ValueError as error:
            raise ConfigError(f"{where} is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{where} is no JSON object but {type(row).__name__}")
        yield where, row


def _finite(text: str) -> float:
    """Refuse NaN and Infinity, which are no JSON: nothing that gets such a row could send it on."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no finite number")
    return number


def request_bodies(row: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Return a row's requests, each with "messages" or one "prompt", a text or token ids: the row itself, or
    what a server captured as {"body": …}. Several prompts are a request each.

    A last message of the assistant's is left out: the target gives its own. Parts of a text are joined.
    Raises ConfigError.
    """
    body = row.get("body", row)
    messages = body.get("messages") if isinstance(body, dict) else None
    if isinstance(messages, list) and messages:
        last = messages[-1]
        if isinstance(last, dict) and last.get("role") == "assistant":
            messages = messages[:-1]
        return [{**body, "messages": [_joined(message) for message in messages]}]
    prompt = body.get("prompt") if isinstance(body, dict) else None
    if prompt is None:
        raise ConfigError(f'{where} has neither "messages" (a list) nor "prompt" (a text)')
    prompts = prompt if isinstance(prompt, list) and not is_ids(prompt) else [prompt]
    if not prompts or not all(each and (isinstance(each, str) or is_ids(each)) for each in prompts):
        raise ConfigError(
            f"{where} has the prompt {str(prompt)[:40]}: give a text that is not empty, token ids, or a list "
            "of either"
        )
    return [{**body, "prompt": each} for each in prompts]


def is_ids(prompt: Any) -> bool:
    """Whether a prompt is given as token ids."""
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)


def _joined(message: Any) -> Any:
    """Return a message whose content is one text where it was a list of texts."""
    parts = message.get("content") if isinstance(message, dict) else None
    if not isinstance(parts, list):
        return message
    said = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    texts = [text for text in said if isinstance(text, str)]
    return {**message, "content": "".join(texts)} if len(texts) == len(parts) else message
