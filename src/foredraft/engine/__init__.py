"""The engine: one loop for plain and speculative decoding, in ragged batches."""

from foredraft.engine.engine import Engine, EngineConfig

__all__ = ["Engine", "EngineConfig"]
