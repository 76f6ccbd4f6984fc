"""The one thread that owns the engine, and the way to it from asyncio."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence

from foredraft.engine import Engine
from foredraft.errors import CapacityError, ConfigError
from foredraft.server.metrics import Metrics
from foredraft.server.prompts import Asked
from foredraft.types import StepOutput

_log = logging.getLogger(__name__)


class EngineFailed(Exception):
    """The engine raised; what ran then is lost."""


class Ticket:
    """The answers that one HTTP request waits for. Lives in the event loop; the worker posts into it."""

    def __init__(self, ids: Sequence[str], asked: Sequence[Asked]) -> None:
        self.ids, self.asked = list(ids), list(asked)
        self.loop = asyncio.get_running_loop()
        self.queued: asyncio.Future[None] = self.loop.create_future()
        self.outputs: asyncio.Queue[StepOutput | EngineFailed] = asyncio.Queue()

    def settle(self, error: Exception | None) -> None:
        """Say that the engine has taken the request, or why it has not."""
        if self.queued.done():
            return
        if error is None:
            self.queued.set_result(None)
        else:
            self.queued.set_exception(error)


class Worker:
    """Runs the engine in a thread of its own. Commands are carried out between two steps."""

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self._engine, self._metrics = engine, metrics
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._tickets: dict[str, Ticket] = {}
        self._stopping = False
        self.failure = ""  # of the last pass; empty when it went well
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self) -> None:
        """Cancel what runs and end the thread."""
        self._commands.put(self._stop)
        self._thread.join()

    @property
    def alive(self) -> bool:
        """True while the thread runs."""
        return self._thread.is_alive()

    def submit(self, ticket: Ticket) -> None:
        """Queue a ticket's answers; `ticket.queued` tells how that went."""
        self._commands.put(lambda: self._add(ticket))

    def cancel(self, ticket: Ticket) -> None:
        """Give up a ticket's answers: their places are free before the next step."""
        self._commands.put(lambda: self._drop(ticket))

    def _run(self) -> None:
        while not self._stopping:
            self._obey()
            if self._engine.has_work and not self._stopping:
                self._step()

    def _obey(self) -> None:
        """Carry out all commands; wait for one if there is nothing else to do."""
        wait = not self._engine.has_work
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return
            command()
            wait = False

    def _stop(self) -> None:
        self._stopping = True
        for request_id in self._tickets:
            self._engine.cancel(request_id)
        self._tickets.clear()

    def _add(self, ticket: Ticket) -> None:
        added: list[str] = []
        problem: Exception | None = None
        try:
            for request_id, asked in zip(ticket.ids, ticket.asked, strict=True):
                self._engine.add(asked.prompt, asked.params, request_id, grammar=asked.grammar)
                added.append(request_id)
        except (ConfigError, CapacityError) as error:
            problem = error
        except Exception as error:
            _log.exception("the engine refused a request")
            problem = EngineFailed(repr(error))
        if problem is None:
            self._tickets |= dict.fromkeys(added, ticket)
        else:
            for request_id in added:
                self._engine.cancel(request_id)
        _post(ticket.loop, lambda: ticket.settle(problem))

    def _drop(self, ticket: Ticket) -> None:
        for request_id in ticket.ids:
            if self._tickets.pop(request_id, None) is not None:
                self._engine.cancel(request_id)

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:
            _log.exception("a step failed; what ran is lost")
            self._fail(EngineFailed(repr(error)))
            return
        if any(output.finish_reason != "cancelled" for output in outputs):  # which takes no pass to tell
            self.failure = ""
        self._metrics.step(outputs, self._engine.stats, self._engine.load)
        for output in outputs:
            ticket = self._tickets.get(output.request_id)
            if ticket is not None:  # else it was cancelled
                if output.finish_reason is not None:
                    del self._tickets[output.request_id]
                _post(ticket.loop, _putter(ticket, output))

    def _fail(self, failure: EngineFailed) -> None:
        self.failure = str(failure)
        for ticket in set(self._tickets.values()):
            _post(ticket.loop, _putter(ticket, failure))
        for request_id in self._tickets:
            self._engine.cancel(request_id)
        self._tickets.clear()


def _putter(ticket: Ticket, item: StepOutput | EngineFailed) -> Callable[[], None]:
    return lambda: ticket.outputs.put_nowait(item)


def _post(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    if not loop.is_closed():  # else nobody is left to be told
        loop.call_soon_threadsafe(call)
