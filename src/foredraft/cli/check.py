"""`foredraft check`."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli.arms import Answering, Asked, need_extra
from foredraft.cli.options import takes_options
from foredraft.cli.output import note, print_json
from foredraft.errors import ConfigError
from foredraft.measure.files import check_place, to_json, write_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from foredraft.measure.check import Certificate
    from foredraft.measure.subjects import Subject
    from foredraft.measure.workload import Ask

DIFFERS = 1


@takes_options
def check(
    asked: Asked,
    answering: Answering,
    answers: Annotated[int, typer.Option(help="Sampled answers a side and prompt; 0: no sampling.")] = 400,
    alpha: Annotated[float, typer.Option(help="Chance of a false alarm of the sampled test.")] = 1e-4,
    greedy: Annotated[int, typer.Option(help="Requests compared greedily.")] = 12,
    out: Annotated[Path | None, typer.Option(help="Write the certificates as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the certificates as JSON.")] = False,
) -> None:
    """Check that drafting changes no output. Exit code 0 only if nothing differs, 1 if something does.

    Greedy answers token by token, sampled ones by a distribution test, parameters one by one.

    [bold]Examples[/bold]

    foredraft check --draft none,ngram --dtype float32

    foredraft check --baseline http://localhost:8000 --variant eagle=http://localhost:8001 --answers 2000
    """
    need_extra()
    from foredraft.measure.check import Plan, run_check

    if not 0 < alpha < 0.5 or answers < 0 or greedy < 1:
        raise ConfigError("use --alpha between 0 and 0.5, --answers from 0 and --greedy from 1")
    asks = asked.load_asks()
    if out is not None:
        check_place(out)
    bodies = [(ask.where if asked.requests else ask.id, ask.body) for ask in asks]
    plan = Plan(greedy=greedy, answers=answers, alpha=alpha)
    with _subjects(answering, asks) as subjects, _status() as on_part:
        if len(subjects) < 2:
            raise ConfigError("there is nothing to compare: name a baseline and a variant")
        certificates = [run_check(subjects[0], other, bodies, plan, on_part) for other in subjects[1:]]
        if not answering.servers and answering.dtype != "float32":
            certificates = _decide_ties(certificates, answering, asks, bodies, on_part)
    records = {"certificates": [certificate.record() for certificate in certificates]}
    _show(certificates, records, as_json)
    if out is not None:
        write_text(out, to_json(records, indent=1) + "\n")
        note(f"wrote {out}")
    raise typer.Exit(0 if all(one.passed for one in certificates) else DIFFERS)


def _decide_ties(
    certificates: list[Certificate],
    answering: Answering,
    asks: Sequence[Ask],
    bodies: Sequence[tuple[str, Mapping[str, Any]]],
    on_part: Callable[[str], None],
) -> list[Certificate]:
    """Compare requests that were ties once more in float32, where there are hardly any."""
    from foredraft.measure.greedy import check_greedy

    ties = [
        {finding.where.removesuffix(" (batched)") for finding in one.greedy if finding.judged == "tie"}
        for one in certificates
    ]
    if not any(ties):
        return certificates
    on_part("ties again, in float32")
    with _subjects(replace(answering, dtype="float32"), asks) as subjects:
        return [
            replace(
                one,
                float32=tuple(check_greedy(subjects[0], other, [b for b in bodies if b[0] in tied])),
            )
            if tied
            else one
            for one, other, tied in zip(certificates, subjects[1:], ties, strict=True)
        ]


def _show(certificates: Sequence[Certificate], records: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(dict(records))
        return
    for certificate in certificates:
        print("\n".join(certificate.lines()))


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield lambda part: status.update(part)


@contextmanager
def _subjects(answering: Answering, asks: Sequence[Ask]) -> Iterator[list[Subject]]:
    """Open who is compared, the baseline first."""
    if answering.servers:
        with _servers(answering, asks[0]) as servers:
            yield servers
        return
    drafts = answering.drafts()
    from foredraft.measure.engine_arm import open_bench
    from foredraft.measure.engine_subject import EngineSubject
    from foredraft.measure.workload import Ask as Request
    from foredraft.measure.workload import Load

    bench = open_bench(answering.load_llm(), asks, [Load(concurrency=16)])

    def encode(body: Mapping[str, Any]) -> tuple[list[int], Any]:
        job = bench.encode(Request("", "", dict(body), "request"))
        return job.prompt, job.params

    yield [
        EngineSubject(name, bench.engine(draft, budget), encode)  # type: ignore[arg-type]
        for name, draft, budget in drafts
    ]


@contextmanager
def _servers(answering: Answering, plain: Ask) -> Iterator[list[Subject]]:
    """Connect to servers; raises ConfigError if one does not even answer a plain request."""
    import asyncio

    from foredraft.measure.run import plain_body
    from foredraft.measure.subjects import ServerSubject

    clients = answering.clients()
    with asyncio.Runner() as runner:
        try:
            subjects: list[Subject] = []
            for name, client in clients:
                runner.run(client.connect())
                subjects.append(ServerSubject(name, client, runner))
                (answer,) = subjects[-1].ask([plain_body(plain, 8)], together=False)
                if answer.refused:
                    raise ConfigError(f"{client.url} does not answer a plain request: {answer.refused}")
            yield subjects
        finally:
            for _, client in clients:
                runner.run(client.close())
