"""Models behind the Target protocol."""

from foredraft.models.hf_causal import HFCausal
from foredraft.models.load import load_target
from foredraft.models.tokenizer import load_tokenizer

__all__ = ["HFCausal", "load_target", "load_tokenizer"]
