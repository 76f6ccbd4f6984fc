"""What each kind of draft is, how it learns, and how it drafts while it is measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.engine.protocols import Proposer
from foredraft.models import HFCausal
from foredraft.models.checkpoint import TargetFacts
from foredraft.models.heads import EagleConfig, EagleLayer
from foredraft.propose.eagle import EagleProposer
from foredraft.propose.heads import load_eagle, read_for, save_eagle, vocabulary
from foredraft.train.collect import Answer
from foredraft.train.eagle import EagleLoss, from_last_layer
from foredraft.train.loop import Trainee
from foredraft.train.measure import draft_with, kv_tokens

EAGLE_LEVELS = 5
_MEASURED_BUDGET = 10


@dataclass(frozen=True)
class Setting:
    """What a recipe starts from: the target as it runs, its facts, its transformers module in float32 and
    config, the answers held out, and what to note in the draft.
    """

    target: HFCausal
    facts: TargetFacts
    model: Any
    held: Sequence[Answer]
    provenance: dict[str, Any]


def fused_layers(num_layers: int) -> tuple[int, ...]:
    """Return the hidden states that an EAGLE head reads: low, middle, and the input of the last layer."""
    return (min(2, num_layers - 1), (num_layers + 1) // 2, num_layers - 1)


def frequent_tokens(answers: Sequence[Answer], count: int, vocab_size: int) -> Tensor:
    """Return the tokens that answers use most, filled up with the lowest ids, int64 [count], ascending."""
    uses = Counter(token for answer in answers for token in answer.token_ids)
    chosen = [token for token, _ in uses.most_common(count)]
    taken = set(chosen)
    chosen += [token for token in range(vocab_size) if token not in taken][: count - len(chosen)]
    return torch.tensor(sorted(chosen))


def eagle(setting: Setting, answers: Sequence[Answer], draft_vocab_size: int) -> Trainee:
    """An EAGLE head, begun as the target's last layer."""
    facts, model = setting.facts, setting.model
    layers = fused_layers(facts.num_layers)
    head = EagleLayer(EagleConfig.like(model.config, layers, draft_vocab_size))
    head.set_vocabulary(frequent_tokens(answers, head.config.draft_vocab_size, facts.vocab_size))
    from_last_layer(head, model)
    embedding = model.get_input_embeddings().weight.detach()
    loss = EagleLoss(head, embedding, model.get_output_embeddings().weight.detach(), EAGLE_LEVELS)

    def measure(path: Path) -> Any:
        proposer = eagle_proposer(path, setting.target, facts, kv_tokens(setting.held))
        return draft_with(setting.target, proposer, setting.held, _MEASURED_BUDGET)

    return Trainee(head, loss, lambda path: save_eagle(path, head, facts, setting.provenance), measure)


def eagle_proposer(path: Path, target: HFCausal, facts: TargetFacts, kv_tokens: int) -> Proposer:
    """Return what drafts with the EAGLE head of a directory."""
    head = load_eagle(read_for(path, "eagle"), facts, target.dtype)
    embedding = vocabulary(facts, "embed", None, target.dtype)
    rows = vocabulary(facts, "lm_head", head.target_ids, target.dtype)
    return EagleProposer(head, embedding=embedding, lm_head=rows, kv_tokens=kv_tokens)
