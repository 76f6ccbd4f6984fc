"""`foredraft demo`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli.options import Loading, takes_options
from foredraft.cli.output import print_json
from foredraft.errors import ConfigError

if TYPE_CHECKING:
    from foredraft.demo import Pair
    from foredraft.llm import LLM
    from foredraft.types import SamplingParams


@takes_options
def demo(
    loading: Loading,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 128,
    as_json: Annotated[bool, typer.Option("--json", help="Print the raw record as one JSON object.")] = False,
) -> None:
    """Show what drafting gains: the same answers, plain and drafted, side by side.

    Decodes a dozen built-in prompts both ways (greedy) and compares speed and every token. Where rounding
    makes two tokens tie, the answers may differ: `tie`. Exits with 1 if any answer differs otherwise: `NO`.

    [bold]Examples[/bold]

    foredraft demo

    foredraft demo --dtype float32 --json > demo.json
    """
    if loading.draft == "none":
        raise ConfigError("--draft none leaves nothing to compare with: use auto, ngram or a draft model")
    from foredraft.types import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    llm = loading.load(prefix_cache=False)  # every answer pays for its own prompt
    pairs = _run(llm, params)
    if as_json:
        _print_record(loading, llm, max_tokens, pairs)
    else:
        _print_table(loading, llm, pairs)
    raise typer.Exit(any(pair.comparison.identical == "NO" for pair in pairs))


def _run(llm: LLM, params: SamplingParams) -> list[Pair]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from foredraft.demo import demo_prompts, run_demo

    prompts = demo_prompts()
    columns = (
        TextColumn("decoding each prompt twice"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("demo", total=len(prompts))
        return run_demo(llm, prompts, params, lambda _: bar.advance(task))


def _print_table(loading: Loading, llm: LLM, pairs: list[Pair]) -> None:
    from rich.console import Console

    from foredraft.demo import demo_table, mean_speedup

    print(f"{loading.model}, {llm.dtype}, draft {llm.draft}, greedy, one request at a time")
    Console().print(demo_table(pairs))
    for place, pair in enumerate(pairs, 1):
        if pair.comparison.identical != "yes":
            print(f"{pair.comparison.identical}: prompt {place} {pair.comparison.why}")
    mean = mean_speedup(pairs)
    print(
        f"mean speed-up {mean.mean:.2f} [{mean.low:.2f}, {mean.high:.2f}] "
        "(geometric mean, 95 % bootstrap interval over the prompts; prompt reading is in tokens/s)"
    )


def _print_record(loading: Loading, llm: LLM, max_tokens: int, pairs: list[Pair]) -> None:
    import foredraft
    from foredraft.demo import demo_record

    settings = {
        "version": foredraft.__version__,
        "model": loading.model,
        "draft": llm.draft,
        "budget": loading.budget,
        "dtype": llm.dtype,
        "max_tokens": max_tokens,
    }
    print_json(settings | demo_record(pairs))
