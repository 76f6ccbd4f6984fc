"""What commands print: answers as they come, the line of figures below them, JSON."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

from foredraft.measure.files import to_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foredraft.llm import LLM
    from foredraft.types import Completion, FinishReason, SamplingParams, SpecStats

INTERRUPTED = 130  # exit code after Ctrl-C


def stats_line(stats: SpecStats, finish: FinishReason) -> str:
    """Return one line: `128 tokens, 41.3 tokens/s, accept_rate 0.52, mean_emitted 2.10, finish length`."""
    return (
        f"{stats.emitted} tokens, {stats.tokens_per_s:.1f} tokens/s, accept_rate {stats.accept_rate:.2f}, "
        f"mean_emitted {stats.mean_emitted:.2f}, finish {finish}"
    )


def note(text: str) -> None:
    """Print a line about an answer, apart from the answer."""
    from rich.console import Console

    Console(stderr=True).print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


def show_stream(llm: LLM, prompt: str | Sequence[int], params: SamplingParams) -> tuple[str, bool]:
    """Print an answer as it comes, then its figures. Return its text, and whether it is whole.

    Ctrl-C cancels the answer.
    """
    text = ""
    with closing(llm.stream(prompt, params)) as pieces:
        try:
            for piece in pieces:
                text += piece.text
                print(piece.text, end="", flush=True)
        except KeyboardInterrupt:
            print(flush=True)
            return text, False
    print()
    if piece.stats is not None and piece.finish_reason is not None:
        note(stats_line(piece.stats, piece.finish_reason))
    return text, True


def completion_record(prompt: str, completion: Completion) -> dict[str, Any]:
    """Return a completion as plain JSON values."""
    from dataclasses import asdict

    from foredraft.llm import stats_record

    record = {"prompt": prompt, **asdict(completion), "stats": stats_record(completion.stats)}
    if completion.logprobs is None:
        del record["logprobs"]
    return record


def print_json(record: dict[str, Any]) -> None:
    """Print one JSON object on a line of its own."""
    sys.stdout.write(to_json(record) + "\n")
