"""Between text and tokens: chat templates, and text that grows token by token up to a stop string.

Tokens are joined as bytes and the bytes decoded as they come: a character split over tokens is shown when it
is whole, bytes that are no text become U+FFFD, and a token costs the same however long the text is.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from foredraft.errors import CapacityError, ConfigError, ModelError

Message = Mapping[str, Any]
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    most: int | None = None,
) -> list[int]:
    """Return the prompt ids of a conversation, ready for the assistant's next turn. tools: as OpenAI gives
    them, for a template that knows what they are. most: as in `encode_text`.

    Raises ConfigError if the tokenizer has no chat template or the messages do not fit it.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            "the model has no chat template: use generate with plain text, or an instruct model"
        )
    _check_messages(messages)
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=True,
        )
    except (TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
        raise ConfigError(f"the messages do not fit the model's chat template: {error}") from error
    return encode_text(tokenizer, text, most=most, add_special_tokens=False)


def shows_system(tokenizer: Any) -> bool:
    """True if the chat template knows system messages: some refuse or drop them."""
    messages = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "Hello"}]
    try:
        return "Be terse." in tokenizer.apply_chat_template(messages, tokenize=False)
    except (TemplateError, TypeError, ValueError, KeyError):
        return False


def encode_text(tokenizer: Any, text: str, *, most: int | None = None, **options: Any) -> list[int]:
    """Return the token ids of a text; raises ConfigError for what no tokenizer reads, and CapacityError for a
    text whose beginning alone has far more than `most` tokens: nobody waits for the rest to be read.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the text is no valid Unicode at character {error.start}, {text[error.start]!r}: give UTF-8 "
            "without halves of surrogate pairs"
        ) from None
    if most is not None:
        _check_length(tokenizer, text, most, options)
    return list(tokenizer.encode(text, **options))


def _check_length(tokenizer: Any, text: str, most: int, options: Mapping[str, Any]) -> None:
    size = 16 * most
    while size < len(text):
        tokens = len(tokenizer.encode(text[:size], **options))
        if tokens > 2 * most:  # a cut changes the last few
            raise CapacityError(
                f"the prompt has more than {tokens} tokens, and with one token of answer at most {most} fit: "
                "shorten it, or raise max_len"
            )
        size *= 4


def encode_prompt(tokenizer: Any, prompt: str | Sequence[int]) -> list[int]:
    """Return the token ids of a text, or those given; raises ConfigError for what no tokenizer reads or
    writes.
    """
    if isinstance(prompt, str):
        return encode_text(tokenizer, prompt)
    foreign = [token for token in prompt if not 0 <= token < len(tokenizer)]
    if foreign:
        raise ConfigError(f"the prompt has token {foreign[0]}: ids go from 0 to {len(tokenizer) - 1}")
    return list(prompt)


def _check_messages(messages: Sequence[Message]) -> None:
    if isinstance(messages, str | Mapping) or not messages:
        raise ConfigError('messages must be a non-empty list of {"role": …, "content": …}')
    for index, message in enumerate(messages):
        if isinstance(message, Mapping) and message.get("tool_calls") and message.get("content") is None:
            raise ConfigError(
                f"messages[{index}] calls a tool and has no text, which only a server answers: leave it out"
            )
        for key in ("role", "content"):
            value = message.get(key) if isinstance(message, Mapping) else None
            if not isinstance(value, str):
                raise ConfigError(
                    f"messages[{index}] has {key} {value!r}: give each message two strings, role and content"
                )


def _byte_of_char() -> dict[str, int]:
    """Byte-level BPE writes bytes as characters: printable Latin-1 as is, the rest from U+0100 on (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


def _kinds(decoder: Mapping[str, Any]) -> set[str]:
    """Return the names of the steps a tokenizer decodes with."""
    if decoder["type"] == "Sequence":
        return {kind for step in decoder["decoders"] for kind in _kinds(step)}
    return {decoder["type"]}


class Detokenizer:
    """What each token adds to a text, as bytes. Stateless: one serves all requests of a tokenizer.

    Joined and decoded as UTF-8 the bytes equal tokenizer.decode(ids, skip_special_tokens=True,
    clean_up_tokenization_spaces=False) with one exception: where byte tokens (<0x..>) in a row are not valid
    UTF-8, tokenizers gives up the whole run, while here its valid characters stay. Raises ModelError for a
    tokenizer without a tokenizer.json.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ModelError(f"{type(tokenizer).__name__} has no tokenizer.json, which streaming needs")
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(token for token, entry in added.items() if entry.special)
        kinds = _kinds(json.loads(backend.decoder.__getstate__())) if backend.decoder else set()
        self._byte_of = _byte_of_char() if kinds == {"ByteLevel"} else None
        self._byte_fallback = "ByteFallback" in kinds

    def added(self, before: int | None, token: int) -> bytes | None:
        """Return the bytes that `token` adds after the text token `before` (None: it is the first).

        None if it is no text: a special token, or an id above the vocabulary (models pad theirs).
        """
        piece = self._backend.id_to_token(token)
        if piece is None or token in self._special:
            return None
        if self._byte_of is not None:
            try:
                return bytes([self._byte_of[char] for char in piece])
            except KeyError:  # an added token, kept as it is written
                return bytes(piece, "utf-8")
        if self._byte_fallback and (byte := _BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        known = [] if before is None else [before]
        text, shown = self._backend.decode([*known, token]), self._backend.decode(known)
        return bytes(text[len(shown) :], "utf-8")


class TextStream:
    """The text of one request as it grows; a `types.TextSink`.

    A stop string ends the text before its first character, at the token that completes it; the first place
    counts, whatever the chunks. It may begin in any token, but one that is complete within the first
    `min_tokens` tokens is text like any other (as vLLM has it).
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._detokenizer, self._stop, self._min_tokens = detokenizer, tuple(stop), min_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._before: int | None = None
        self._count = 0
        self._ready: list[str] = []
        self._tail = ""  # the longest end of the text that a stop string may begin with
        self._stopped = False

    def push(self, token_ids: Sequence[int]) -> int | None:
        """Take new tokens; if a stop string ends the text return how many tokens in all count, else None."""
        for token in token_ids:
            self._count += 1
            added = self._detokenizer.added(self._before, token)
            if added is None:
                continue
            self._before = token
            self._grow(self._utf8.decode(added))
            if self._stopped:
                return self._count
        return None

    def take(self, *, final: bool) -> str:
        """Return what is safe to show and was not shown before; if final, everything that is left."""
        if final and not self._stopped:
            self._ready.append(self._tail + self._utf8.decode(b"", final=True))
            self._tail = ""
        text = "".join(self._ready)
        self._ready.clear()
        return text

    def _grow(self, text: str) -> None:
        window = self._tail + text
        start = self._find(window) if text and self._count > self._min_tokens else -1
        if start >= 0:
            self._ready.append(window[:start])
            self._tail, self._stopped = "", True
            return
        held = max((overlap(window, stop) for stop in self._stop), default=0)
        self._tail = window[len(window) - held :]
        self._ready.append(window[: len(window) - held])

    def _find(self, window: str) -> int:
        """Return where the first stop string starts that reaches beyond the tail, or -1."""
        old = len(self._tail)
        starts = [window.find(stop, max(0, old - len(stop) + 1)) for stop in self._stop]
        return min((start for start in starts if start >= 0), default=-1)


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that `stop` begins with, `stop` itself apart."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
