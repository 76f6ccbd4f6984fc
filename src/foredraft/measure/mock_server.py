"""A server whose truth is known: set times, chunks and acceptance, and faults on request."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

_STALL_S = 0.05  # how often a request that is never answered is looked at
_WORDS = ("alpha", "bravo", "delta", "gamma", "kappa", "omega", "sigma", "theta")  # of one length


@dataclass(frozen=True, slots=True)
class MockTruth:
    """What is true of a mock server. Times in seconds.

    The first chunk of `chunk` tokens comes after ttft_s, the next ones every chunk * inter_token_s. Of the
    `levels` guessed per step a share of accept_rate is accepted (0 levels: it does not draft). The first
    `slow_first` requests take three times as long; every `error_every`-th fails and every `stall_every`-th is
    never answered (0: none); usage is multiplied by `usage_factor`; above `most` requests at once it answers
    429 (0: no limit). `salt` changes the answers, as another model would.
    """

    model: str = "mock"
    ttft_s: float = 0.1
    inter_token_s: float = 0.01
    chunk: int = 1
    levels: int = 0
    accept_rate: float = 0.6
    slow_first: int = 0
    error_every: int = 0
    stall_every: int = 0
    usage_factor: float = 1.0
    most: int = 0
    api_key: str = ""
    salt: str = ""
    per_response: bool = True


@dataclass(slots=True)
class _State:
    served: int = 0
    running: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: dict[int, int] = field(default_factory=dict)


def mock_app(truth: MockTruth) -> Starlette:
    """Return an ASGI application that behaves as `truth` says."""
    server = _Mock(truth)
    return Starlette(
        routes=[
            Route("/v1/models", server.models),
            Route("/v1/chat/completions", server.answer, methods=["POST"]),
            Route("/v1/completions", server.answer, methods=["POST"]),
            Route("/metrics", server.metrics),
        ]
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    """One answer: its tokens as text, when it was asked for, how much slower than set, what was accepted."""

    tokens: tuple[str, ...]
    asked_s: float
    slower: float
    accepted_by_step: tuple[int, ...]
    chat: bool
    logprobs: bool


class _Mock:
    def __init__(self, truth: MockTruth) -> None:
        self.truth, self.state = truth, _State()

    async def models(self, request: Request) -> Response:
        if refused := self._refused(request):
            return refused
        return JSONResponse({"object": "list", "data": [{"id": self.truth.model, "object": "model"}]})

    async def metrics(self, request: Request) -> Response:
        if not self.truth.levels:
            return PlainTextResponse("")
        state, name = self.state, "vllm:spec_decode_num"
        lines = [
            f"{name}_drafts_total {state.drafts}",
            f"{name}_draft_tokens_total {state.drafted}",
            f"{name}_accepted_tokens_total {state.accepted}",
        ]
        lines += [
            f'{name}_accepted_tokens_per_pos_total{{position="{depth}"}} {count}'
            for depth, count in sorted(state.accepted_at.items())
        ]
        return PlainTextResponse("\n".join(lines) + "\n")

    async def answer(self, request: Request) -> Response:
        if refused := self._refused(request):
            return refused
        body = json.loads(await request.body())
        self.state.served += 1
        if body.get("model") != self.truth.model:
            return _error(404, f"model {body.get('model')!r} does not exist")
        if self.truth.error_every and self.state.served % self.truth.error_every == 0:
            return _error(500, "a fault that was asked for")
        if self.truth.stall_every and self.state.served % self.truth.stall_every == 0:
            while not await request.is_disconnected():
                await asyncio.sleep(_STALL_S)
            return Response()
        if self.truth.most and self.state.running >= self.truth.most:
            return _error(429, f"more than {self.truth.most} requests at once")
        plan = self._plan(body)
        if body.get("stream"):
            self.state.running += 1
            return StreamingResponse(self._stream(plan), media_type="text/event-stream")
        await _until(plan.asked_s + self._seconds(len(plan.tokens), plan.slower))
        choice = {"index": 0, "finish_reason": "length", "logprobs": _logprobs(plan, plan.tokens)}
        text = "".join(plan.tokens)
        choice |= {"message": {"role": "assistant", "content": text}} if plan.chat else {"text": text}
        return JSONResponse({"choices": [choice], **self._closing(plan)})

    def _refused(self, request: Request) -> Response | None:
        key = self.truth.api_key
        if key and request.headers.get("authorization") != f"Bearer {key}":
            return _error(401, "wrong key")
        return None

    def _plan(self, body: Mapping[str, Any]) -> _Plan:
        asked = json.dumps([body.get("messages"), body.get("prompt"), self.truth.salt])
        digest = hashlib.sha256(asked.encode()).digest()
        count = int(body.get("max_tokens", 16))
        tokens = tuple(_WORDS[digest[place % 32] % len(_WORDS)] + " " for place in range(count))
        slow = self.state.served <= self.truth.slow_first
        logprobs = body.get("logprobs") not in (None, False)
        return _Plan(
            tokens,
            time.perf_counter(),
            3.0 if slow else 1.0,
            self._accept(count),
            "messages" in body,
            logprobs,
        )

    def _accept(self, count: int) -> tuple[int, ...]:
        """Return how many guesses each step of an answer keeps: every depth is reached by its share of the
        steps, as exactly as whole numbers allow, over all answers.
        """
        truth, state, kept = self.truth, self.state, []
        left = count
        while truth.levels and left > 0:
            state.drafts += 1
            state.drafted += truth.levels
            # the next accepted count is what brings the total nearest to its share
            accepted = min(max(round(truth.accept_rate * state.drafted) - state.accepted, 0), truth.levels)
            accepted = min(accepted, left - 1)
            state.accepted += accepted
            for depth in range(accepted):
                state.accepted_at[depth] = state.accepted_at.get(depth, 0) + 1
            left -= accepted + 1
            kept.append(accepted)
        return tuple(kept)

    def _seconds(self, tokens: int, slower: float) -> float:
        return slower * (self.truth.ttft_s + self.truth.inter_token_s * (tokens - 1))

    async def _stream(self, plan: _Plan) -> AsyncIterator[str]:
        try:
            size = self.truth.chunk
            for start in range(0, len(plan.tokens), size):
                part = plan.tokens[start : start + size]
                later = start + len(part) - min(size, len(plan.tokens))  # tokens after the first chunk
                await _until(plan.asked_s + self._seconds(later + 1, plan.slower))
                choice: dict[str, Any] = {
                    "index": 0,
                    "finish_reason": None,
                    "logprobs": _logprobs(plan, part),
                }
                choice |= {"delta": {"content": "".join(part)}} if plan.chat else {"text": "".join(part)}
                yield _event({"choices": [choice]})
            yield _event({"choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": "length"}]})
            yield _event({"choices": [], **self._closing(plan)})
            yield "data: [DONE]\n\n"
        finally:
            self.state.running -= 1

    def _closing(self, plan: _Plan) -> dict[str, Any]:
        """Usage, and what was accepted."""
        claimed = round(len(plan.tokens) * self.truth.usage_factor)
        closing: dict[str, Any] = {"usage": {"prompt_tokens": 10, "completion_tokens": claimed}}
        if self.truth.levels and self.truth.per_response:
            kept = plan.accepted_by_step
            closing["metrics"] = {
                "speculative_decoding": {
                    "num_spec_steps": len(kept),
                    "num_draft_tokens": len(kept) * self.truth.levels,
                    "num_accepted_draft_tokens": sum(kept),
                    "acceptance_histogram": [kept.count(n) for n in range(self.truth.levels + 1)],
                }
            }
        return closing


def _logprobs(plan: _Plan, tokens: tuple[str, ...]) -> dict[str, Any] | None:
    if not plan.logprobs:
        return None
    if plan.chat:
        return {"content": [{"token": token, "logprob": -0.5, "top_logprobs": []} for token in tokens]}
    return {"tokens": list(tokens), "token_logprobs": [-0.5] * len(tokens), "top_logprobs": None}


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message}}, status_code=status)


async def _until(when: float) -> None:
    """Sleep up to a moment of perf_counter, so that delays do not add up."""
    await asyncio.sleep(max(0.0, when - time.perf_counter()))
