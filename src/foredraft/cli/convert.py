"""`foredraft convert`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli.output import note, print_json
from foredraft.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from foredraft.models.checkpoint import Finding, HeadFiles, TargetFacts


def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A directory that holds a draft head.")],
    destination: Annotated[
        Path | None, typer.Argument(metavar="DST", help="The directory to write; must not exist.")
    ] = None,
    to: Annotated[str, typer.Option(help="Layout to write: medusa, eagle3, speculators or eagle1.")] = "",
    only_lint: Annotated[
        bool,
        typer.Option("--lint", help="Write nothing; say what is wrong with SRC, exit 1 if it cannot run."),
    ] = False,
    target: Annotated[
        str, typer.Option(help="The head's target: a zoo name, directory or Hugging Face id.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a draft head in another layout, or check one.

    eagle3 is what SpecForge writes and SGLang reads, speculators what vLLM reads, medusa and eagle1 what the
    programs of Medusa and EAGLE read. Weights stay bit by bit the same. With --target, what foredraft's heads
    take from the target (its vocabulary matrix) is written out for programs that want it in the file.

    [bold]Examples[/bold]

    foredraft convert heads/eagle vllm-head --to speculators --target smollm2-135m

    foredraft convert --lint downloaded-head --target smollm2-135m
    """
    if only_lint == (destination is not None):
        raise ConfigError("give DST and --to LAYOUT to convert, or --lint and no DST to check")
    from foredraft.models.checkpoint import lint, read_head

    files = read_head(source)
    facts = _facts(target)
    findings = lint(files, facts)
    done = [] if destination is None else _convert(files, destination, to, facts)
    failed = only_lint and any(finding.severity == "error" for finding in findings)
    if as_json:
        print_json(_record(files, findings, destination, to, done))
    else:
        _show(files, findings, destination, done)
    raise typer.Exit(1 if failed else 0)


def _facts(target: str) -> TargetFacts | None:
    if not target:
        return None
    from foredraft import zoo
    from foredraft.models.checkpoint import target_facts

    return target_facts(zoo.resolve(target, progress=True))


def _convert(files: HeadFiles, destination: Path, to: str, target: TargetFacts | None) -> list[str]:
    from foredraft.models.checkpoint import LAYOUTS, LAYOUTS_OF, exported, write_head

    layout = next((known for known in LAYOUTS if known == to), None)
    if layout is None:
        raise ConfigError(f"--to {to!r} is no layout: use {', '.join(LAYOUTS)}")
    if destination.exists():
        raise ConfigError(f"{destination} exists: name a directory that does not, or remove it")
    if layout not in LAYOUTS_OF[files.kind]:
        raise CheckpointError(f"{files.path} is of kind {files.kind}, which --to {to} cannot hold")
    complete, done = exported(files, layout, target)
    write_head(destination, complete, layout)
    return done


def _record(
    files: HeadFiles, findings: list[Finding], destination: Path | None, to: str, done: list[str]
) -> dict[str, object]:
    from dataclasses import asdict

    return {
        "source": str(files.path),
        "kind": files.kind,
        "layout": files.layout,
        "hidden_layers": files.hidden_layers,
        "tensors": len(files.tensors),
        "findings": [asdict(finding) for finding in findings],
        "destination": str(destination) if destination else None,
        "written_as": to or None,
        "changes": done,
    }


def _show(files: HeadFiles, findings: list[Finding], destination: Path | None, done: list[str]) -> None:
    for finding in findings:
        say = print if destination is None else note
        say(f"{finding.severity}: {finding.text}")
    for change in done:
        note(change)
    if destination is not None:
        print(destination)
    elif not findings:
        print(f"{files.path}: {files.kind} head in the {files.layout} layout, nothing to remark")
