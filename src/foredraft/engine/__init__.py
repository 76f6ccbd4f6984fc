"""The engine: one loop for plain and speculative decoding, in ragged batches."""

from foredraft.engine.config import EngineConfig
from foredraft.engine.engine import Engine

__all__ = ["Engine", "EngineConfig"]
