"""foredraft: exact speculative decoding for Hugging Face models."""
