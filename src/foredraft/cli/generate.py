"""`foredraft generate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli.options import Loading, Sampling, read_stdin, takes_options
from foredraft.cli.output import INTERRUPTED, completion_record, note, print_json, show_stream, stats_line
from foredraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foredraft.llm import LLM


@takes_options
def generate(
    loading: Loading,
    sampling: Sampling,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT…", help="Prompts; - reads one from stdin.")
    ] = None,
    file: Annotated[
        list[Path] | None, typer.Option(help="A file that is one prompt; may be repeated.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities, and those of this many others.")
    ] = None,
) -> None:
    """Answer prompts.

    One prompt streams; several are answered together, in order.

    [bold]Examples[/bold]

    foredraft generate "What is a prime number?" --max-tokens 100

    foredraft generate - --temperature 0 --json < prompt.txt

    foredraft generate --raw "def add(a, b):" --stop "def " --draft none
    """
    texts = _texts(prompts or [], file or [])
    if logprobs is not None and not as_json:
        raise ConfigError("--logprobs is shown with --json only: add --json")
    params = sampling.params(logprobs)
    llm = loading.load()
    inputs = [_encode(llm, text, raw) for text in texts]
    if len(inputs) == 1 and not as_json:
        _, whole = show_stream(llm, inputs[0], params)
        raise typer.Exit(0 if whole else INTERRUPTED)
    completions = llm.generate(inputs, params, progress=sys.stderr.isatty())
    for place, (text, completion) in enumerate(zip(texts, completions, strict=True), 1):
        if as_json:
            print_json(completion_record(text, completion))
        else:
            print(f"[{place}] {completion.text}", flush=True)
            note(stats_line(completion.stats, completion.finish_reason))


def _texts(prompts: list[str], files: list[Path]) -> list[str]:
    texts = [read_stdin() if prompt == "-" else prompt for prompt in prompts]
    for file in files:
        try:
            texts.append(file.read_text(encoding="utf-8-sig"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--file {file} cannot be read as text: {error}") from error
    if not texts:
        raise ConfigError("there is no prompt: give one, or --file FILE, or - to read stdin")
    return texts


def _encode(llm: LLM, text: str, raw: bool) -> str | Sequence[int]:
    """Return what generate takes: with a chat template the text is what a user says."""
    if raw or not llm.tokenizer.chat_template:
        return text
    from foredraft.text import encode_chat

    if not text.strip():
        raise ConfigError("the prompt is empty: give at least one word")
    return encode_chat(llm.tokenizer, [{"role": "user", "content": text}])
