"""From the engine's outputs to OpenAI's objects."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from foredraft.server.calls import GrowingCall
from foredraft.server.grammar import CALL_BEGIN
from foredraft.server.metrics import Tally
from foredraft.text import Detokenizer
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


@dataclass(slots=True)
class Choice:
    """One answer as it grows. may_call: it may be a tool call, whose text is not shown as such."""

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
    entries: list[dict[str, Any]] = field(default_factory=list)  # chat logprobs
    wants_logprobs: bool = False
    call: GrowingCall | None = None
    traced: list[dict[str, str]] = field(default_factory=list)
    _before: int | None = None
    _utf8: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

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
        delta: dict[str, Any] = {} if self.call else {"content": shown}
        if called:
            delta = {"tool_calls": [called]}
        logprobs = self.logprobs(new) if self.wants_logprobs else None
        body = {"delta": delta} if self.chat else {"text": shown}
        return {"index": self.index, **body, "logprobs": logprobs, "finish_reason": self.finish}

    def whole(self) -> dict[str, Any]:
        """Return the finished choice."""
        logprobs = self.logprobs(self.entries) if self.wants_logprobs else None
        said: dict[str, Any] = {"text": self.text}
        if self.chat:
            said = {
                "message": {"role": "assistant", "content": None if self.call else self.text, "refusal": None}
            }
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
        start = sum(len(entry["token"]) for entry in self.entries) - sum(len(e["token"]) for e in entries)
        offsets = []
        for entry in entries:
            offsets.append(start)
            start += len(entry["token"])
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [{t["token"]: t["logprob"] for t in e["top_logprobs"]} for e in entries],
            "text_offset": offsets,
        }

    def _told(self, text: str) -> tuple[str, dict[str, Any] | None]:
        """Return what to show of new text, and what it says of a tool call: either is told, as it grows."""
        if not self.may_call:
            return text, None
        if self.call is None:
            self.held += text
            if not self.held.startswith(CALL_BEGIN):
                if not self.finish and CALL_BEGIN.startswith(self.held):
                    return "", None
                self.may_call = False
                return self.held, None
            self.call, text = GrowingCall(), self.held
        called = self.call.take(text)
        if self.finish and self.call.name is None:  # it was cut before anything was told
            self.may_call, shown, self.call = False, self.call.text, None
            return shown, None
        if self.finish == "stop" and self.call.closed:
            self.finish = "tool_calls"
        return "", called

    def _entry(self, entry: TokenLogprob) -> dict[str, Any]:
        top = [self._logprob(token, logprob) for token, logprob in entry.top]
        said = {**self._logprob(entry.token, entry.logprob), "top_logprobs": top}
        self._before = entry.token
        return said

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
