"""From the engine's outputs to OpenAI's objects."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from foredraft.server.calls import GrowingCall
from foredraft.server.grammar import CALL_BEGIN
from foredraft.server.metrics import Tally
from foredraft.text import Detokenizer, overlap
from foredraft.types import SpecStats, StepOutput, TokenLogprob

_LOWEST = -9999.0  # JSON has no -inf


class TokenTexts:
    """Tokens as text, for logprobs and traces."""

    def __init__(self, tokenizer: Any) -> None:
        self._detokenizer, self._backend = Detokenizer(tokenizer), tokenizer.backend_tokenizer

    def bytes_of(self, token: int, before: int | None) -> bytes:
        """Return what a token adds to a text; the name of a special token."""
        added = self._detokenizer.added(before, token)
        return added if added is not None else (self._backend.id_to_token(token) or "").encode()

    def shown(self, token: int, before: int | None) -> bytes:
        """Return what a token adds to the text that is shown."""
        return self._detokenizer.added(before, token) or b""


def _decoder() -> Any:
    return codecs.getincrementaldecoder("utf-8")("replace")


@dataclass(slots=True)
class Choice:
    """One answer as it grows. may_call: it may end with a tool call, whose text is not shown as such."""

    index: int
    texts: TokenTexts
    chat: bool
    may_call: bool = False
    trace: bool = False
    begun: bool = False  # its first chunk was sent
    text: str = ""
    held: str = ""
    finish: str | None = None
    stats: SpecStats = field(default_factory=SpecStats)
    tally: Tally = field(default_factory=Tally)
    entries: list[dict[str, Any]] = field(default_factory=list)  # logprobs
    wants_logprobs: bool = False
    call: GrowingCall | None = None
    traced: list[dict[str, str]] = field(default_factory=list)
    _before: int | None = None
    _counted: int = 0  # characters of the text of all tokens
    _utf8: Any = field(default_factory=_decoder)
    _counting: Any = field(default_factory=_decoder)

    def take(self, output: StepOutput) -> dict[str, Any] | None:
        """Take one step's output; return the choice of its chunk, None if there is nothing to tell yet."""
        self.stats, self.finish = output.stats, output.finish_reason
        self.tally.step(output.stats)
        if output.logprobs is not None:
            self.wants_logprobs = True
        new = [self._entry(entry) for entry in output.logprobs or ()]
        self.traced = self._trace(output) if self.trace else []
        self._before = output.token_ids[-1] if output.token_ids else self._before
        shown, called = self._told(output.text)
        self.text += shown
        self.entries += new
        if not (shown or called or new or self.traced or self.finish):
            return None
        delta: dict[str, Any] = {"content": shown} if shown or not self.call else {}
        if called:
            delta["tool_calls"] = [called]
        logprobs = self.logprobs(new) if self.wants_logprobs else None
        body = {"delta": delta} if self.chat else {"text": shown}
        return {"index": self.index, **body, "logprobs": logprobs, "finish_reason": self.finish}

    def whole(self) -> dict[str, Any]:
        """Return the finished choice."""
        logprobs = self.logprobs(self.entries) if self.wants_logprobs else None
        said: dict[str, Any] = {"text": self.text}
        if self.chat:
            content = self.text if self.text or not self.call else None
            said = {"message": {"role": "assistant", "content": content, "refusal": None}}
            if self.call:
                said["message"]["tool_calls"] = [self.call.said]
        return {"index": self.index, **said, "logprobs": logprobs, "finish_reason": self.finish}

    def live(self) -> dict[str, Any]:
        """Return where the chunk's tokens came from, and the figures so far."""
        stats = self.stats
        figures = {
            "accept_rate": stats.accept_rate,
            "levels": stats.levels,
            "mean_emitted": stats.mean_emitted,
        }
        return {"tokens": self.traced, "live": figures}

    def logprobs(self, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return logprobs as the endpoint has them."""
        if self.chat:
            return {"content": list(entries), "refusal": None}
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [entry[name] for entry in entries] for name in names}

    def _told(self, text: str) -> tuple[str, dict[str, Any] | None]:
        """Return what to show of new text, and what it says of a tool call: either is told, as it grows."""
        if not self.may_call:
            return text, None
        shown = ""
        if self.call is None:
            text = self.held + text
            begin = text.find(CALL_BEGIN)
            if begin < 0:
                begin = len(text) - (0 if self.finish else overlap(text, CALL_BEGIN))
                self.held = text[begin:]
                return text[:begin], None
            self.call, shown, text = GrowingCall(), text[:begin], text[begin:]
        called = self.call.take(text)
        if self.finish and self.call.name is None:  # it was cut before anything was told
            shown, self.call = shown + self.call.text, None
            return shown, None
        if self.finish == "stop" and self.call.closed:
            self.finish = "tool_calls"
        return shown, called

    def _entry(self, entry: TokenLogprob) -> dict[str, Any]:
        own, *top = [self._logprob(*each) for each in ((entry.token, entry.logprob), *entry.top)]
        if self.chat:
            said = {**own, "top_logprobs": top}
        else:
            named: dict[str, float] = {}  # the token itself, then the likeliest of those that look the same
            for each in (own, *top):
                named.setdefault(_name(each), each["logprob"])
            said = {
                "tokens": _name(own),
                "token_logprobs": own["logprob"],
                "top_logprobs": named,
                "text_offset": self._place(self.texts.shown(entry.token, self._before)),
            }
        self._before = entry.token
        return said

    def _place(self, added: bytes) -> int:
        """Return which character of the text what a token adds begins with: one that is begun may go on."""
        self._counted += len(self._counting.decode(added[:1]))
        whole = added and not self._counting.getstate()[0]  # the character is counted
        place = self._counted - 1 if whole else self._counted
        self._counted += len(self._counting.decode(added[1:]))
        return place

    def _logprob(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self.texts.bytes_of(token, self._before)
        return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, _LOWEST), "bytes": list(raw)}

    def _trace(self, output: StepOutput) -> list[dict[str, str]]:
        """Return what each token adds to the text, and whether it was a(ccepted), r(ecovered) or b(onus)."""
        traced, before = [], self._before
        if output.logprobs:  # which have moved on
            before = None
        for token, origin in zip(output.token_ids, output.origins, strict=True):
            traced.append({"text": self._utf8.decode(self.texts.shown(token, before)), "origin": origin})
            before = token
        return traced


def _name(said: dict[str, Any]) -> str:
    """Return a token as text logprobs name it: its text, or its bytes if they are part of a character."""
    token: str = said["token"]
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in said["bytes"]) if "\ufffd" in token else token


def usage(prompt_tokens: int, choices: Sequence[Choice]) -> dict[str, int]:
    """Return the token counts; tokens are counted by the engine, whatever was streamed."""
    completion = sum(choice.stats.emitted for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
    }


def closing(prompt_tokens: int, choices: Sequence[Choice]) -> dict[str, Any]:
    """Return what stands beside the choices of a finished answer."""
    return {"usage": usage(prompt_tokens, choices), "metrics": metrics(choices)}


def metrics(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return what drafting did, under vLLM's names and meanings, and under our own."""
    total, steps, histogram = SpecStats(), 0, list[int]()
    for choice in choices:
        total.add(choice.stats)
        steps += choice.tally.steps
        longer = len(choice.tally.histogram) - len(histogram)
        histogram += [0] * longer
        for accepted, count in enumerate(choice.tally.histogram):
            histogram[accepted] += count
    longest = max((choice.stats.total_s for choice in choices), default=0.0)
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + total.accepted / steps if steps else 1.0,
            "draft_acceptance_rate": total.accepted / total.drafted if total.drafted else 0.0,
            "acceptance_histogram": histogram,
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": total.accepted,
            "num_draft_tokens": total.drafted,
            "num_spec_tokens": max((choice.tally.most for choice in choices), default=0),
        },
        "foredraft": {
            "steps": total.steps,
            "drafted": total.drafted,
            "levels": total.levels,
            "accepted": total.accepted,
            "emitted": total.emitted,
            "accept_rate": total.accept_rate,
            "mean_emitted": total.mean_emitted,
            "accepted_at": total.accepted_at,
            "ttft_s": max((choice.stats.ttft_s for choice in choices), default=0.0),
            "total_s": longest,
            "tokens_per_s": total.emitted / longest if longest else 0.0,
        },
    }
