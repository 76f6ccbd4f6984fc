"""The options that measure, check and advise share: what is asked, and who answers."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from foredraft.cli.options import DEFAULT_MODEL, dtype_option, model_option, need, option
from foredraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from foredraft.llm import LLM
    from foredraft.measure.client import Client
    from foredraft.measure.run import Arm
    from foredraft.measure.workload import Ask, Load

REQUESTS, ENGINE, SERVERS = "What is asked", "This engine", "Servers"


def loads_of(load: str, rate: str = "") -> list[Load]:
    """Return the loads of --load and --rate; raises ConfigError."""
    from foredraft.measure.workload import parse_loads

    loads = parse_loads(load, rate)
    labels = [one.label for one in loads]
    if len(set(labels)) < len(labels):
        raise ConfigError(f"two loads are the same, of {', '.join(labels)}: name each once")
    return loads


def need_extra() -> None:
    """Raise ConfigError if the packages that measuring needs are not installed."""
    need(("httpx2", "scipy", "starlette", "uvicorn"), "measure")


@dataclass(frozen=True)
class Asked:
    """Which requests."""

    requests: Annotated[
        list[Path],
        option(REQUESTS, "JSONL of OpenAI bodies, captured requests or messages; may be repeated."),
    ] = field(default_factory=list)
    limit: Annotated[int | None, option(REQUESTS, "Use the first N requests of each file.")] = None
    max_tokens: Annotated[int, option(REQUESTS, "Longest answer.")] = 128
    temperature: Annotated[float, option(REQUESTS, "Of requests that do not say; 0 is greedy.")] = 0.0
    seed: Annotated[int, option(REQUESTS, "Of requests that do not say, one more for each.")] = 0

    def load_asks(self) -> list[Ask]:
        """Read the requests; raises ConfigError."""
        need_extra()
        from foredraft.measure.workload import Defaults, load_asks

        for name in ("limit", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value} is too small: use 1 or more")
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"--temperature {self.temperature:g} is none: use 0 (greedy) or more")
        defaults = Defaults(self.max_tokens, self.temperature, self.seed)
        return load_asks(self.requests, defaults, self.limit)


@dataclass(frozen=True)
class Answering:
    """Engines in this process that differ in the draft, or servers by URL."""

    model: Annotated[str, model_option(ENGINE)] = DEFAULT_MODEL
    draft: Annotated[
        str, option(ENGINE, "Drafts to compare, the baseline first; NAME:N drafts at most N per step.")
    ] = "none,ngram"
    dtype: Annotated[str, dtype_option(ENGINE)] = "auto"
    baseline: Annotated[str, option(SERVERS, "URL of the server without drafting.")] = ""
    variant: Annotated[list[str], option(SERVERS, "NAME=URL of a server that drafts; may be repeated.")] = (
        field(default_factory=list)
    )
    model_name: Annotated[
        str | None, option(SERVERS, "Model to ask the servers for; the first they serve by default.")
    ] = None
    api_key: Annotated[str | None, option(SERVERS, "Key of the servers.", envvar="OPENAI_API_KEY")] = None
    timeout: Annotated[float, option(SERVERS, "Seconds that a request may take, to its last token.")] = 600.0

    @property
    def servers(self) -> bool:
        """True when servers are named."""
        return bool(self.baseline or self.variant)

    def clients(self) -> list[tuple[str, Client]]:
        """Return the servers by name, the baseline first; raises ConfigError."""
        from foredraft.measure.client import Client

        defaults = {item.name: item.default for item in fields(self)}
        given = [name for name in ("model", "draft", "dtype") if getattr(self, name) != defaults[name]]
        if given:
            named = ", ".join(f"--{name}" for name in given)
            raise ConfigError(f"{named} is for engines here, and servers are named: leave one out")
        if not 0 < self.timeout < math.inf:
            raise ConfigError(f"--timeout {self.timeout:g} is no limit: use seconds, more than 0")
        pairs = [("baseline", self.baseline)] if self.baseline else []
        for text in self.variant:
            name, _, url = text.partition("=")
            if not url.startswith("http"):
                raise ConfigError(f"--variant {text!r} is not understood: use NAME=URL")
            pairs.append((name, url))
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            raise ConfigError(f"two arms have one name: {', '.join(names)}")
        return [
            (name, Client(url, model=self.model_name, api_key=self.api_key, timeout_s=self.timeout))
            for name, url in pairs
        ]

    def load_llm(self) -> LLM:
        """Load the model, without a draft."""
        from foredraft.cli.options import Loading

        return Loading(model=self.model, draft="none", dtype=self.dtype).load(prefix_cache=False)

    def drafts(self) -> list[tuple[str, str, int | str]]:
        """Return (name, draft, budget) for each part of --draft; raises ConfigError."""
        from foredraft.propose import check_draft

        parts = [part.strip() for part in self.draft.split(",") if part.strip()]
        if not parts or len(set(parts)) < len(parts):
            raise ConfigError(f"--draft {self.draft!r} is no list of different drafts: use none,ngram")
        drafts = [_draft(part) for part in parts]
        for name, draft, budget in drafts:
            check_draft(draft)
            if draft == "none" and budget not in ("auto", 0):
                raise ConfigError(f"--draft {name} gives no draft a budget: use none, or a draft")
        return drafts

    @contextmanager
    def arms(self, asks: Sequence[Ask], loads: Sequence[Load]) -> Iterator[list[Arm]]:
        """Open what answers, connected; raises ConfigError."""
        arms = self._server_arms() if self.servers else self._engine_arms(asks, loads)
        try:
            for arm in arms:
                arm.connect(asks[0].endpoint)
            yield arms
        finally:
            for arm in arms:
                arm.close()

    def _server_arms(self) -> list[Arm]:
        from foredraft.measure.server_arm import ServerArm

        return [ServerArm(name, client) for name, client in self.clients()]

    def _engine_arms(self, asks: Sequence[Ask], loads: Sequence[Load]) -> list[Arm]:
        from foredraft.measure.engine_arm import EngineArm, open_bench

        named = self.drafts()
        bench = open_bench(self.load_llm(), asks, loads)
        return [
            EngineArm(name, draft, bench.engine(draft, budget), bench)  # type: ignore[arg-type]
            for name, draft, budget in named
        ]


def _draft(part: str) -> tuple[str, str, int | str]:
    draft, colon, budget = part.rpartition(":")
    if colon and budget.isdecimal():
        return part, draft, int(budget)
    return part, part, "auto"
