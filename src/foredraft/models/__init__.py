"""Models behind the Target protocol."""

from foredraft.engine.protocols import Target
from foredraft.models.hf_causal import HFCausal
from foredraft.models.load import load_target
from foredraft.models.tokenizer import load_tokenizer

__all__ = ["HFCausal", "Target", "load_target", "load_tokenizer"]
