"""Prompts to train on: JSONL files of conversations, texts, or requests that a server captured."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.errors import ConfigError
from foredraft.rows import read_rows, request_bodies
from foredraft.text import encode_chat, encode_prompt


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids. key: a hash of the ids, by which a prompt is known across runs."""

    ids: tuple[int, ...]
    key: str


def encode_row(row: dict[str, Any], tokenizer: Any, where: str) -> list[list[int]]:
    """Return the token ids of each prompt of a row: {"messages"}, {"prompt"}, or a captured request {"body":
    either}.

    A last message of the assistant's is left out: the target gives its own. Raises ConfigError.
    """
    bodies = request_bodies(row, where)
    try:
        return [
            encode_chat(tokenizer, body["messages"])
            if "messages" in body
            else encode_prompt(tokenizer, body["prompt"])
            for body in bodies
        ]
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def load_prompts(files: Sequence[Path], tokenizer: Any, *, longest: int) -> list[Prompt]:
    """Return the prompts of all files, each once, in the order of their keys; longer ones are left out.

    That order mixes the files and stays when files are added. Raises ConfigError for a bad line, or if
    nothing is left.
    """
    prompts: dict[str, Prompt] = {}
    dropped = 0
    for path in files:
        for where, row in read_rows(path):
            for ids in encode_row(row, tokenizer, where):
                if len(ids) > longest:
                    dropped += 1
                    continue
                key = hashlib.blake2b(json.dumps(ids).encode(), digest_size=8).hexdigest()
                prompts[key] = Prompt(tuple(ids), key)
    if not prompts:
        names = ", ".join(str(path) for path in files) or "no file"
        raise ConfigError(
            f"no prompt is left in {names}: {dropped} have more than {longest} tokens; raise the limit, if "
            "the model's context allows, or give other files"
        )
    return [prompts[key] for key in sorted(prompts)]
