"""Models behind the Target protocol."""

from foredraft.models.hf_causal import HFCausal
from foredraft.models.load import load_target

__all__ = ["HFCausal", "load_target"]
