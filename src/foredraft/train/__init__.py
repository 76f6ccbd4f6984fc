"""Training of drafts: heads and distilled models, on answers that the target itself gives."""
