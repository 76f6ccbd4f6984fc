"""`foredraft mock-server`."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from foredraft.cli.arms import need_extra
from foredraft.cli.options import listen
from foredraft.cli.output import note


def mock_server(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8099,
    model: Annotated[str, typer.Option(help="Name of the model.")] = "mock",
    ttft: Annotated[float, typer.Option(help="Seconds to the first token.")] = 0.1,
    inter_token: Annotated[float, typer.Option(help="Seconds per token after it.")] = 0.01,
    chunk: Annotated[int, typer.Option(help="Tokens shown at a time.", min=1)] = 1,
    levels: Annotated[int, typer.Option(help="Tokens guessed per step; 0: it does not draft.", min=0)] = 0,
    accept_rate: Annotated[float, typer.Option(help="Share of the guesses accepted.", min=0, max=1)] = 0.6,
    slow_first: Annotated[int, typer.Option(help="So many requests take three times as long.")] = 0,
    error_every: Annotated[int, typer.Option(help="Every n-th request fails; 0: none.")] = 0,
    stall_every: Annotated[int, typer.Option(help="Every n-th request is never answered; 0: none.")] = 0,
    usage_factor: Annotated[float, typer.Option(help="Usage is this times the truth.")] = 1.0,
    most: Annotated[int, typer.Option(help="Refuse more requests at once; 0: never.")] = 0,
    api_key: Annotated[str, typer.Option(help="Refuse requests without this key.")] = "",
) -> None:
    """Serve answers whose truth is known, to test what measures servers.

    [bold]Examples[/bold]

    foredraft mock-server --port 8100 --inter-token 0.02

    foredraft mock-server --port 8101 --inter-token 0.01 --chunk 3 --levels 4 --accept-rate 0.6
    """
    need_extra()
    import uvicorn

    from foredraft.measure.mock_server import MockTruth, mock_app

    truth = MockTruth(
        model=model,
        ttft_s=ttft,
        inter_token_s=inter_token,
        chunk=chunk,
        levels=levels,
        accept_rate=accept_rate,
        slow_first=slow_first,
        error_every=error_every,
        stall_every=stall_every,
        usage_factor=usage_factor,
        most=most,
        api_key=api_key,
    )
    with listen(host, port) as listener, suppress(KeyboardInterrupt):
        shown = f"[{host}]" if ":" in host else host
        note(f"{model} at http://{shown}:{listener.getsockname()[1]}; Ctrl-C ends")
        uvicorn.Server(uvicorn.Config(mock_app(truth), log_level="warning")).run(sockets=[listener])
