"""`foredraft chat`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli.options import Loading, Sampling, read_stdin, takes_options
from foredraft.cli.output import INTERRUPTED, note, show_stream
from foredraft.cli.remote import Remote, ServerError
from foredraft.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from foredraft.llm import LLM
    from foredraft.types import SamplingParams

HELP = "/reset starts anew, /quit or Ctrl-D leaves, Ctrl-C cancels an answer."


@takes_options
def chat(
    loading: Loading,
    sampling: Sampling,
    url: Annotated[
        str, typer.Option(help="Talk to an OpenAI-compatible server, as http://127.0.0.1:8000, instead.")
    ] = "",
    api_key: Annotated[
        str, typer.Option(help="The server's API key.", envvar="FOREDRAFT_API_KEY", show_envvar=True)
    ] = "",
) -> None:
    """Talk to the model, or to a server.

    /reset starts anew, /quit or Ctrl-D leaves, Ctrl-C cancels the running answer. When stdin is not a
    terminal, it is one question.

    [bold]Examples[/bold]

    foredraft chat --temperature 0.7 --seed 1

    echo "Name three rivers." | foredraft chat

    foredraft chat --url http://127.0.0.1:8000
    """
    params = sampling.params()
    given = [item.name for item in fields(Loading) if getattr(loading, item.name) != item.default]
    if url and given:
        named = ", ".join(f"--{name}" for name in given)
        raise ConfigError(f"{named} is for a model loaded here, and --url for a server's: leave one out")

    def load() -> LLM | Remote:
        return Remote(url, api_key) if url else loading.load()

    if sys.stdin.isatty():
        llm = load()
        note(HELP)
        talk(llm, params, lambda: input("> "))
        return
    question = read_stdin().strip()
    if not question:
        raise ConfigError("stdin is empty: pipe a question in, or run chat in a terminal")
    _, whole = _answer(load(), params, [{"role": "user", "content": question}])
    raise typer.Exit(0 if whole else INTERRUPTED)


def talk(llm: LLM | Remote, params: SamplingParams, ask: Callable[[], str]) -> None:
    """Answer what `ask` returns until it raises EOFError or says /quit."""
    messages: list[dict[str, str]] = []
    while True:
        try:
            said = ask().strip()
            said.encode()  # under C.UTF-8 Python reads bytes that are no text as surrogates
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            note(f"\n{HELP}")
            continue
        except UnicodeError as error:
            note(f"error: that is no UTF-8 text: {error}")
            continue
        if said == "/quit":
            return
        if said == "/reset":
            messages.clear()
            note("a new conversation")
        elif said.startswith("/"):
            note(f"{said} is no command. {HELP}")
        elif said:
            _turn(llm, params, messages, said)


def _turn(llm: LLM | Remote, params: SamplingParams, messages: list[dict[str, str]], said: str) -> None:
    """Answer one message. What was shown of a cancelled answer stays in the conversation."""
    messages.append({"role": "user", "content": said})
    try:
        text, _ = _answer(llm, params, messages)
    except (CapacityError, ConfigError, ServerError) as error:
        messages.pop()
        note(f"error: {error}. /reset starts anew.")
        return
    if text:
        messages.append({"role": "assistant", "content": text})
    else:
        messages.pop()


def _answer(llm: LLM | Remote, params: SamplingParams, messages: list[dict[str, str]]) -> tuple[str, bool]:
    if isinstance(llm, Remote):
        return llm.show(messages, params)
    from foredraft.text import encode_chat

    return show_stream(llm, encode_chat(llm.tokenizer, messages), params)
