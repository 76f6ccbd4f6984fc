"""`foredraft train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from foredraft.cli.output import print_json
from foredraft.errors import ConfigError
from foredraft.rows import read_rows


def train(
    kind: Annotated[
        str,
        typer.Argument(
            help="eagle, medusa, draft (a small model distilled from the target) or medusa2 (medusa, and a "
            "new target: its answers differ)."
        ),
    ],
    prompts: Annotated[
        list[Path],
        typer.Argument(help='JSONL files: {"messages"}, {"prompt"}, or what `serve --capture` wrote.'),
    ],
    out: Annotated[
        Path, typer.Option(help="Directory of the draft; a killed run goes on from what is there.")
    ],
    model: Annotated[
        str, typer.Option(help="The target: zoo name, directory or Hugging Face id.")
    ] = "smollm2-135m",
    epochs: Annotated[int, typer.Option(help="Most epochs; it ends when two in a row do not help.")] = 2,
    limit: Annotated[int | None, typer.Option(help="Use so many prompts.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer of the target's to learn from.")] = 128,
    longest: Annotated[
        int, typer.Option(help="Leave out prompts of more tokens, or of more than the context holds.")
    ] = 640,
    temperature: Annotated[
        list[float] | None, typer.Option(help="Of the answers; may be repeated. Default: 0 and 1 in turn.")
    ] = None,
    draft_vocab: Annotated[
        int | None,
        typer.Option(help="Draft from so many tokens, those that answers use most. Default: 8192."),
    ] = None,
    start_from: Annotated[
        str | None,
        typer.Option(help="Go on from such a draft: a directory, or eagle, medusa, distilled (shipped)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train a draft for your own model on your own prompts.

    The target answers the prompts itself, its hidden states are kept, and the draft learns from them. After
    each epoch prompts that were held out are answered with the draft, and the best one stays in --out, with
    provenance.json beside it. Use it as --draft OUT; after medusa2 with --model OUT/target.

    [bold]Example[/bold]

    foredraft train eagle prompts.jsonl --out my-eagle

    foredraft generate --draft ./my-eagle "Tell me a story."

    On several GPUs: accelerate launch --multi_gpu -m foredraft train eagle prompts.jsonl --out my-eagle
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.progress import TimeRemainingColumn as Left
    from transformers.utils import logging

    from foredraft.train.processes import processes
    from foredraft.train.run import Options
    from foredraft.train.run import train as run

    for path in prompts:
        what = "is no file" if path.exists() else "does not exist"
        if path.is_file():
            what = "" if next(read_rows(path), None) else "has no prompt"
        if what:
            raise ConfigError(f"{path} {what}: give JSONL files of prompts")
    logging.disable_progress_bar()
    options = Options(
        epochs=epochs,
        max_tokens=max_tokens,
        temperatures=tuple(temperature or (0.0, 1.0)),
        longest=longest,
        limit=limit,
        draft_vocab_size=draft_vocab,
        start_from=start_from,
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        Left(),
    )
    group = processes()
    with Progress(*columns, console=Console(stderr=True), disable=not group.is_main_process) as progress:
        record = run(kind, prompts, model, out, options, progress)
    group.end_training()
    if not group.is_main_process:
        return
    if as_json:
        print_json(record)
    else:
        _show(record, out)


def _show(record: dict[str, Any], out: Path) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    rates = record["held_out_accepted_at"]
    table = Table("epoch", "mean_emitted", "accepted_at", box=box.SIMPLE_HEAD)
    for epoch, (mean, row) in enumerate(zip(record["held_out_mean_emitted"], rates, strict=True), start=1):
        table.add_row(str(epoch), f"{mean:.2f}", " ".join(f"{rate:.2f}" for rate in row))
    console = Console()
    console.print(
        f"{record['kind']} for {record['target']}: {record['answer_tokens']} tokens of answers", markup=False
    )
    console.print(table)
    use = f"--draft {out}"
    if record["kind"] == "medusa2":
        console.print(
            f"{record['notice']}. On answers held out: {record['mean_kl']:.4f} nats a token from the old "
            f"law, another likeliest token at {record['other_token']:.1%} of places"
        )
        use = f"--model {out / 'target'} {use}"
    console.print(f"in {out}: use it as {use}", markup=False)
