"""What a server is told at its start."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from pathlib import Path

from foredraft.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CaptureConfig:
    """Where requests are recorded, the share of them that is, the size of a file in bytes before it is put
    aside, how many files are kept, and which fields (dotted) are blotted out.
    """

    path: Path
    share: float = 1.0
    max_bytes: int = 256_000_000
    keep: int = 4
    redact: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.path.is_dir():
            raise ConfigError(f"--capture {self.path} is a directory: name a file")
        if not 0 < self.share <= 1:
            raise ConfigError(f"--capture-share {self.share} is out of range: use more than 0, up to 1")
        if self.max_bytes < 1_000_000:
            raise ConfigError(f"--capture-max-mb {self.max_bytes / 1e6:g} is too small: use 1 or more")
        if self.keep < 1:
            raise ConfigError(f"--capture-keep {self.keep} is too small: use 1 or more")
        if "" in self.redact:
            raise ConfigError("--capture-redact is empty: name a field, as in messages.content")


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """model_name: what clients call the model. max_queue answers may wait beyond those that run. A body has
    at most max_body bytes, an answer at most max_tokens tokens (None: what the context leaves), a request
    deadline_s seconds. On shutdown running answers get grace_s seconds to finish.
    """

    model_name: str
    max_seqs: int = 16
    max_queue: int = 64
    max_body: int = 4_000_000
    max_tokens: int | None = None
    deadline_s: float = 600.0
    grace_s: float = 20.0
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    cors_origins: tuple[str, ...] = ()
    capture: CaptureConfig | None = None

    def __post_init__(self) -> None:
        limits = (
            ("max_queue", 0),
            ("max_body", 1000),
            ("max_tokens", 1),
            ("deadline_s", 0.1),
            ("grace_s", 0),
        )
        for name, least in limits:
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name}={value} is too small: use {least} or more")

    def knows(self, key: bytes) -> bool:
        """True if an API key is one of ours, in time that does not depend on how much of it is right."""
        return any([hmac.compare_digest(key, known.encode()) for known in self.api_keys])


def read_keys(path: Path) -> tuple[str, ...]:
    """Return the API keys of a file, one a line; blank lines and lines that begin with # are left out."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()  # editors may begin it with a BOM
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ConfigError(f"--api-key-file {path} cannot be read: {reason}") from error
    keys: list[str] = []
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        if not line.isascii():
            raise ConfigError(
                f"--api-key-file {path}, line {number}, is not ASCII: use a key that a header can carry"
            )
        keys.append(line)
    if not keys:
        raise ConfigError(f"--api-key-file {path} has no key: write one a line")
    return tuple(keys)
