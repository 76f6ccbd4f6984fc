"""`foredraft serve`."""

from __future__ import annotations

import math
import os
import signal
import socket
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from foredraft.cli.options import Loading, listen, need, option, takes_options
from foredraft.errors import ConfigError

if TYPE_CHECKING:
    from foredraft.server.config import CaptureConfig, ServeConfig

WHERE, LIMITS, CAPTURE = "Where and for whom", "Limits", "Capture"


@dataclass(frozen=True)
class Address:
    """Where the server listens, and whom it answers."""

    host: Annotated[str, option(WHERE, "Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, option(WHERE, "Port; 0 takes a free one.", min=0, max=65535)] = 8000
    name: Annotated[str, option(WHERE, "What clients call the model; by default as --model says.")] = ""
    api_key: Annotated[
        list[str],
        option(
            WHERE, "Key that clients must send; may be repeated.", "--api-key", envvar="FOREDRAFT_API_KEY"
        ),
    ] = field(default_factory=list)
    api_key_file: Annotated[Path | None, option(WHERE, "File of keys, one a line.")] = None
    cors_origin: Annotated[
        list[str],
        option(WHERE, "Web origin that may call; may be repeated. None by default.", "--cors-origin"),
    ] = field(default_factory=list)
    log_level: Annotated[str, option(WHERE, "debug, info, warning or error.")] = "info"


@dataclass(frozen=True)
class Limits:
    """How much is taken on."""

    max_seqs: Annotated[int, option(LIMITS, "Answers written at once.", min=1)] = 16
    max_queue: Annotated[int, option(LIMITS, "Answers that may wait; more are refused (429).", min=0)] = 64
    max_len: Annotated[int | None, option(LIMITS, "Longest prompt and answer, in tokens.", min=2)] = None
    max_tokens: Annotated[int | None, option(LIMITS, "Longest answer, in tokens.", min=1)] = None
    max_batch_tokens: Annotated[
        int | None,
        option(LIMITS, "Prompt tokens fed per step; by default 512, or --max-seqs if that is more.", min=1),
    ] = None
    max_body_mb: Annotated[float, option(LIMITS, "Largest request body.", min=0.001)] = 4.0
    deadline: Annotated[float, option(LIMITS, "Seconds that a request may take.", min=0.1)] = 600.0
    grace: Annotated[float, option(LIMITS, "Seconds that answers may go on at shutdown.", min=0)] = 20.0
    kv_gb: Annotated[float | None, option(LIMITS, "Memory for the KV cache, in GB.")] = None


@dataclass(frozen=True)
class Capturing:
    """Whether and how requests are recorded."""

    capture: Annotated[Path | None, option(CAPTURE, "File that requests are appended to.")] = None
    capture_share: Annotated[float, option(CAPTURE, "Share of the requests, up to 1.")] = 1.0
    capture_max_mb: Annotated[float, option(CAPTURE, "Size at which the file is put aside.")] = 256.0
    capture_keep: Annotated[int, option(CAPTURE, "Files that are kept in all.")] = 4
    capture_redact: Annotated[
        list[str],
        option(CAPTURE, "Field to blot out, as messages.content; may be repeated.", "--capture-redact"),
    ] = field(default_factory=list)

    def config(self) -> CaptureConfig | None:
        """Return it checked; None if nothing is captured."""
        from foredraft.server.config import CaptureConfig

        if self.capture is None:
            for item in fields(self):
                if getattr(self, item.name) != getattr(Capturing(), item.name):
                    raise ConfigError(f"--{item.name.replace('_', '-')} needs --capture: say to which file")
            return None
        size = _bytes("--capture-max-mb", self.capture_max_mb)
        return CaptureConfig(
            self.capture, self.capture_share, size, self.capture_keep, tuple(self.capture_redact)
        )


def _bytes(name: str, size: float, unit: float = 1e6) -> int:
    if not math.isfinite(size):
        raise ConfigError(f"{name} {size} is no size: give a finite number")
    return int(size * unit)


@takes_options
def serve(loading: Loading, address: Address, limits: Limits, capturing: Capturing) -> None:
    """Serve the model over HTTP, as OpenAI's API has it.

    Needs pip install 'foredraft\\[serve]'. Open the address in a browser to chat and watch the draft. SIGTERM
    or Ctrl-C lets running answers finish.

    [bold]Examples[/bold]

    foredraft serve --draft ngram

    foredraft serve --model smollm2-135m --port 8001 --api-key-file keys.txt --capture requests.jsonl
    """
    need(("fastapi", "uvicorn", "prometheus_client", "llguidance"), "serve")
    config = _config(loading, address, limits, capturing)
    if address.log_level not in ("debug", "info", "warning", "error"):
        raise ConfigError(f"--log-level {address.log_level!r} is unknown: use debug, info, warning or error")
    with listen(address.host, address.port) as listener:
        _run(loading, address, limits, config, listener)


def _config(loading: Loading, address: Address, limits: Limits, capturing: Capturing) -> ServeConfig:
    from foredraft.server.config import ServeConfig, read_keys

    keys = tuple(address.api_key)
    if any(not key.strip() or not key.isascii() for key in keys):
        raise ConfigError("--api-key is empty or not ASCII: give one that a header can carry")
    if address.api_key_file is not None:
        keys += read_keys(address.api_key_file)
    if not keys and "FOREDRAFT_API_KEY" in os.environ:
        raise ConfigError("FOREDRAFT_API_KEY is set and holds no key: give one, or unset it to serve anybody")
    if limits.kv_gb is not None:
        _bytes("--kv-gb", limits.kv_gb, 1e9)
    return ServeConfig(
        model_name=address.name or loading.model,
        max_seqs=limits.max_seqs,
        max_queue=limits.max_queue,
        max_body=_bytes("--max-body-mb", limits.max_body_mb),
        max_tokens=limits.max_tokens,
        deadline_s=limits.deadline,
        grace_s=limits.grace,
        api_keys=keys,
        cors_origins=tuple(address.cors_origin),
        capture=capturing.config(),
    )


def _run(
    loading: Loading, address: Address, limits: Limits, config: ServeConfig, listener: socket.socket
) -> None:
    from foredraft.cli.output import note
    from foredraft.server.app import create_app, make_server, make_service
    from foredraft.server.capture import open_capture
    from foredraft.server.logs import log_as_json

    if config.capture is not None:
        os.close(open_capture(config.capture.path))  # so that what is wrong with it is told at once
    llm = loading.load(
        max_seqs=limits.max_seqs,
        max_len=limits.max_len,
        kv_gb=limits.kv_gb,
        max_batch_tokens=limits.max_batch_tokens,
    )
    service = make_service(llm, config)
    log_as_json(address.log_level)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    note(f"{config.model_name} at http://{shown}:{port}, draft {llm.draft}; Ctrl-C ends")
    server = make_server(create_app(service, draft=llm.draft), service)
    # uvicorn raises the signal that ended it once more: SIGTERM is a regular end, Ctrl-C an interrupt.
    signal.signal(signal.SIGTERM, lambda *_: None)
    server.run(sockets=[listener])
