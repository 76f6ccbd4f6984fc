"""A small model distilled from the target: some of its layers, its embeddings, taught its laws (Zhou et al.,
DistillSpec, arXiv 2310.08461).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from foredraft.errors import CheckpointError
from foredraft.models.checkpoint import TargetFacts
from foredraft.models.load import DRAFT_VOCABULARY
from foredraft.propose.distilled import complete, is_distilled
from foredraft.train.data import Batch


class DistilLoss(nn.Module):
    """Forward KL from the target's laws to the model's, at all places of the answers.

    lm_head: [draft vocab, hidden], rows of the target's.
    """

    def __init__(self, model: Any, lm_head: Tensor) -> None:
        super().__init__()
        self.model, self.lm_head = model, lm_head

    def forward(self, batch: Batch, epoch: int) -> tuple[Tensor, Tensor]:
        """Return the loss, and the share of places where the likeliest token is the target's, [1]."""
        answer, row = batch.places()
        own = last_states(self.model, batch)[answer, row]
        with torch.no_grad():
            law = torch.softmax(batch.logits(answer, row, self.lm_head), -1)
        logits = (own @ self.lm_head.t()).float()
        loss = -(law * torch.log_softmax(logits, -1)).sum(-1).mean()
        return loss, (logits.argmax(-1) == law.argmax(-1)).float().mean().unsqueeze(0)


def last_states(model: Any, batch: Batch) -> Tensor:
    """Run a transformers model over a batch; return what it projects to logits, [answers, tokens, hidden]."""
    rows = batch.states.shape[1]
    mask = torch.arange(rows, device=batch.rows.device) < batch.rows[:, None]
    out = model.base_model(input_ids=batch.ids[:, :rows], attention_mask=mask.long(), use_cache=False)
    found: Tensor = out.last_hidden_state
    return found


def chosen_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """Return the layers to keep: as many from the beginning as from the end."""
    first = (count + 1) // 2
    return (*range(first), *range(num_layers - (count - first), num_layers))


def cut(model: Any, layers: Sequence[int]) -> Any:
    """Return a copy of a transformers model with some of its layers; its embeddings do not learn."""
    kept = model.model.layers
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in layers]
    small: Any = type(model)(config)
    state = {name: value for name, value in model.state_dict().items() if ".layers." not in name}
    for place, layer in enumerate(layers):
        state |= {f"model.layers.{place}.{n}": v for n, v in kept[layer].state_dict().items()}
    small.load_state_dict(state)
    return with_fixed_embeddings(small)


def earlier(path: Path, facts: TargetFacts) -> tuple[Any, Tensor]:
    """Load a distilled draft to train it on: the model, and the tokens it drafts from, int64 [draft vocab].

    Raises CheckpointError if it is another kind of draft, or for another target.
    """
    from transformers import AutoModelForCausalLM

    if not is_distilled(path):
        raise CheckpointError(f"{path} holds no distilled draft: start from one, or from none")
    home = complete(path, facts)
    model = AutoModelForCausalLM.from_pretrained(home, dtype=torch.float32)
    return with_fixed_embeddings(model), load_file(home / DRAFT_VOCABULARY)["token_ids"]


def with_fixed_embeddings(model: Any) -> Any:
    """Return a transformers model whose vocabulary matrices do not learn."""
    model.get_input_embeddings().weight.requires_grad_(False)
    model.get_output_embeddings().weight.requires_grad_(False)
    return model.eval()
