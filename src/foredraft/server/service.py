"""Requests on their way through the engine: admission, deadline, disconnects, streams."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from foredraft.errors import CapacityError, ConfigError, ForedraftError
from foredraft.server import answers
from foredraft.server.answers import Choice, TokenTexts
from foredraft.server.capture import Capture
from foredraft.server.config import ServeConfig
from foredraft.server.errors import ApiError, refused
from foredraft.server.metrics import Metrics
from foredraft.server.prompts import Prepared, Preparer, count_answers
from foredraft.server.schemas import ChatRequest, CompletionRequest
from foredraft.server.streams import ClientGone, Emit, EventStream, unless_gone, until
from foredraft.server.worker import EngineFailed, Ticket, Worker
from foredraft.types import StepOutput


@dataclass(slots=True)
class Running:
    """One HTTP request whose answers are being written."""

    body: ChatRequest | CompletionRequest
    prepared: Prepared
    choices: list[Choice]
    ticket: Ticket
    head: dict[str, Any]  # id, created, model


class Service:
    """All that the routes share. Lives in the event loop."""

    def __init__(
        self,
        config: ServeConfig,
        worker: Worker,
        preparer: Preparer,
        texts: TokenTexts,
        metrics: Metrics,
        capture: Capture | None,
    ) -> None:
        self.config, self.worker, self.metrics, self.capture = config, worker, metrics, capture
        self._preparer, self._texts = preparer, texts
        self._prepare = ThreadPoolExecutor(1, "prepare")  # one: a tokenizer serves one thread at a time
        self._places = 0  # answers that are prepared, wait or run
        self._seconds = 1.0  # that an answer takes, a running mean
        self._active: set[asyncio.Task[Any]] = set()
        self.draining = False

    async def answer(self, request: Request, body: ChatRequest | CompletionRequest) -> Response:
        """Answer a chat or text completion; raises ApiError."""
        self._check(body)
        deadline = time.monotonic() + self.config.deadline_s
        try:
            if body.stream:
                ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                work = self._stream(request, body, ready)
                return await EventStream.begin(work, ready, deadline, request.receive)
            whole = until(deadline, self._whole(request, body))
            response: Response = await unless_gone(request.receive, whole)
            return response
        except ClientGone:
            return Response(status_code=499)

    def _check(self, body: ChatRequest | CompletionRequest) -> None:
        if self.draining:
            raise self._reject("shutdown", 503, "the server is shutting down", 5)
        if not self.worker.alive:
            raise ApiError(503, "the engine has stopped")
        if body.model is not None:
            self.check_model(body.model)

    def check_model(self, name: str) -> None:
        """Raise ApiError if the model is another one."""
        known = self.config.model_name
        if name != known:
            raise ApiError(
                404,
                f"the model {name!r} does not exist: this server has {known!r}",
                param="model",
                code="model_not_found",
            )

    def _record(self, request: Request, body: ChatRequest | CompletionRequest) -> None:
        if self.capture is not None:
            said = body.model_dump(mode="json", by_alias=True, exclude_unset=True)
            self.capture.record(request.state.request_id, request.url.path, said)

    async def _prepared(self, body: ChatRequest | CompletionRequest) -> Prepared:
        prepare: Any = self._preparer.chat if isinstance(body, ChatRequest) else self._preparer.completion
        try:
            prepared: Prepared = await asyncio.get_running_loop().run_in_executor(
                self._prepare, prepare, body
            )
        except ForedraftError as error:
            raise refused(error, type(body).model_fields) from error
        return prepared

    def _reject(self, reason: str, status: int, message: str, after_s: float) -> ApiError:
        self.metrics.rejected.labels(reason).inc()
        return ApiError(status, message, code=reason, headers={"retry-after": str(math.ceil(after_s))})

    @contextmanager
    def _admitted(self, count: int) -> Iterator[None]:
        """Take places for `count` answers, or refuse."""
        most = self.config.max_seqs + self.config.max_queue
        if count > most:
            raise ApiError(
                400,
                f"{count} answers (n for each prompt) are more than this server can hold, {most}: use a "
                "smaller n or fewer prompts, or start it with a larger --max-queue",
                param="n",
            )
        if self._places + count > most:
            rounds = max(1, self._places / self.config.max_seqs)
            after = min(60.0, max(1.0, rounds * self._seconds))
            raise self._reject("queue_full", 429, f"{self._places} answers wait or run, {most} may", after)
        self._places += count
        start, counts = time.monotonic(), True
        try:
            yield
        except ApiError:
            counts = False  # nothing was written
            raise
        finally:
            self._places -= count
            if counts:
                self._seconds += 0.1 * (time.monotonic() - start - self._seconds)

    @contextmanager
    def _tracked(self) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self._active.add(task)
        try:
            yield
        finally:
            self._active.discard(task)

    async def _run(
        self,
        request: Request,
        body: ChatRequest | CompletionRequest,
        on_start: Callable[[Running], None],
        on_output: Callable[[Running, Choice, StepOutput], Awaitable[None]],
    ) -> Running:
        """Write all answers of a request; whatever happens, none is left behind in the engine."""
        with self._admitted(count_answers(body)), self._tracked():
            prepared = await self._prepared(body)
            request.state.log["prompt_tokens"] = prepared.prompt_tokens
            running = self._running(request, body, prepared)
            self.worker.submit(running.ticket)
            try:
                await self._queued(running)
                self._record(request, body)  # not before: what is refused here would be refused in a replay
                self.metrics.prompt_tokens.inc(prepared.prompt_tokens)
                on_start(running)
                left = {
                    request_id: choice
                    for request_id, choice in zip(running.ticket.ids, running.choices, strict=True)
                }
                while left:
                    output = await running.ticket.outputs.get()
                    if isinstance(output, EngineFailed):
                        raise ApiError(500, "the engine failed; the request may be sent again")
                    await on_output(running, left[output.request_id], output)
                    if output.finish_reason is not None:
                        del left[output.request_id]
                self._check_grammars(prepared)
            finally:
                self.worker.cancel(running.ticket)
                request.state.log["completion_tokens"] = sum(c.stats.emitted for c in running.choices)
                request.state.log["finish"] = ",".join(c.finish or "cancelled" for c in running.choices)
        return running

    def _running(
        self, request: Request, body: ChatRequest | CompletionRequest, prepared: Prepared
    ) -> Running:
        chat, name = isinstance(body, ChatRequest), request.state.request_id
        trace = body.foredraft.trace
        choices = [
            Choice(index, self._texts, chat, prepared.calls, trace) for index in range(len(prepared.asked))
        ]
        unique = f"{name}-{time.monotonic_ns():x}"  # a client may use a request id twice
        ids = [f"{unique}-{choice.index}" for choice in choices]
        prefix = "chatcmpl" if chat else "cmpl"
        head = {"id": f"{prefix}-{name}", "created": int(time.time()), "model": self.config.model_name}
        return Running(body, prepared, choices, Ticket(ids, prepared.asked), head)

    @staticmethod
    async def _queued(running: Running) -> None:
        try:
            await running.ticket.queued
        except (ConfigError, CapacityError) as error:
            raise refused(error, type(running.body).model_fields) from error
        except EngineFailed as error:
            raise ApiError(500, "the engine failed; the request may be sent again") from error

    @staticmethod
    def _check_grammars(prepared: Prepared) -> None:
        for asked in prepared.asked:
            if asked.grammar is not None and asked.grammar.error:
                param = "tools" if prepared.calls else "response_format"
                raise ApiError(400, f"the grammar is too complex: {asked.grammar.error}", param=param)

    async def _whole(self, request: Request, body: ChatRequest | CompletionRequest) -> Response:
        async def take(running: Running, choice: Choice, output: StepOutput) -> None:
            choice.take(output)

        running = await self._run(request, body, lambda running: None, take)
        kind = "chat.completion" if isinstance(body, ChatRequest) else "text_completion"
        return JSONResponse(
            {
                "object": kind,
                **running.head,
                "choices": [choice.whole() for choice in running.choices],
                **answers.closing(running.prepared.prompt_tokens, running.choices),
            }
        )

    def _stream(
        self, request: Request, body: ChatRequest | CompletionRequest, ready: asyncio.Future[None]
    ) -> Callable[[Emit], Coroutine[Any, Any, None]]:
        chat = isinstance(body, ChatRequest)
        kind = "chat.completion.chunk" if chat else "text_completion"
        asked_usage = body.stream_options.include_usage if body.stream_options is not None else None
        unfinished: dict[str, Any] = {"usage": None} if asked_usage else {}

        async def write(emit: Emit) -> None:
            def start(running: Running) -> None:
                ready.set_result(None)

            async def take(running: Running, choice: Choice, output: StepOutput) -> None:
                chunk = choice.take(output)
                if chunk is None:
                    return
                if chat and not choice.begun:
                    chunk["delta"] = {"role": "assistant", **chunk["delta"]}
                    choice.begun = True
                traced = {"foredraft": choice.live()} if body.foredraft.trace else {}
                closing = unfinished
                # No further chunk, unless asked for: many clients take every chunk to have a choice.
                if asked_usage is None and all(each.finish for each in running.choices):
                    closing = answers.closing(running.prepared.prompt_tokens, running.choices)
                await emit({"object": kind, **running.head, "choices": [chunk], **closing, **traced})

            running = await self._run(request, body, start, take)
            if asked_usage:
                closing = answers.closing(running.prepared.prompt_tokens, running.choices)
                await emit({"object": kind, **running.head, "choices": [], **closing})

        return write

    async def drain(self, grace_s: float) -> None:
        """Take no new requests; give those that run `grace_s` seconds, then end them."""
        self.draining = True
        end = time.monotonic() + grace_s
        while self._active and (left := end - time.monotonic()) > 0:
            await asyncio.wait(self._active, timeout=left)
        for task in self._active:
            task.cancel("shutdown")

    def close(self) -> None:
        """Stop the engine's thread and the rest."""
        self.worker.stop()
        self._prepare.shutdown()
        if self.capture is not None:
            self.capture.close()
