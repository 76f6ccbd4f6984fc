"""Medusa heads and their target, trained together (Cai et al., arXiv 2401.10774, section 2.2.2).

The heads guess better, and the target is another model than before: what it answers has changed.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.errors import ConfigError
from foredraft.models import load_tokenizer
from foredraft.models.checkpoint import TargetFacts, target_facts
from foredraft.train.collect import Answer
from foredraft.train.data import Batch
from foredraft.train.distil import last_states
from foredraft.train.loop import Group, Trainee
from foredraft.train.medusa import MedusaLoss
from foredraft.train.recipes import Setting, medusa_loss, save_heads
from foredraft.types import SpecStats

TARGET = "target"  # the new target's directory, beside the files of its heads
NOTICE = (
    "medusa2 trains the target too: its law no longer holds, and the new target's answers differ. The heads "
    "draft for the new target only"
)
_WARM_UP = 1  # epochs of the heads alone: untrained ones would only spoil the target
# What a nat of the heads' loss may cost in divergence: at 0.2 SmolLM2-135M is 0.3 nats off after 22 steps.
_HEADS_SHARE = 0.05
_RATE_SHARE = 0.02  # of the target's learning rate, beside the heads'


class Medusa2Loss(nn.Module):
    """The heads' loss on a target that learns, and the divergence of its laws from those it had.

    model: a transformers module. The heads alone learn in the first epoch, from the states on file.
    """

    def __init__(self, model: Any, medusa: MedusaLoss) -> None:
        super().__init__()
        self.model, self.medusa = model, medusa

    @property
    def vocabulary(self) -> Tensor:
        """The projection to logits, [vocab, hidden], which does not learn."""
        weight: Tensor = self.model.get_output_embeddings().weight.detach()
        return weight

    def forward(self, batch: Batch, epoch: int) -> tuple[Tensor, Tensor]:
        """Return the loss, and of each head the share of places where its likeliest token is the target's."""
        if epoch < _WARM_UP:
            heads, right = self.medusa(batch, epoch)
            return heads, right
        renewed = batch.with_states(last_states(self.model, batch))
        heads, right = self.medusa(renewed, epoch)
        return divergence(batch, renewed, self.vocabulary).mean() + _HEADS_SHARE * heads, right


def divergence(old: Batch, new: Batch, vocabulary: Tensor) -> Tensor:
    """Return the KL divergence from the old law to the new one at every place of the answers, float32 [n].

    old, new: the same answers with states of either target; vocabulary: [vocab, hidden].
    """
    answer, row = old.places()
    with torch.no_grad():
        wanted = torch.log_softmax(old.logits(answer, row, vocabulary), -1)
    found = torch.log_softmax(new.logits(answer, row, vocabulary), -1)
    return (wanted.exp() * (wanted - found)).sum(-1)


def medusa2(setting: Setting, answers: Sequence[Answer], draft_vocab_size: int) -> Trainee:
    """Medusa heads and a new target. Its vocabulary matrices stay: heads and laws are read through them."""
    model = setting.model
    medusa, ids = medusa_loss(setting, answers, draft_vocab_size)
    loss = Medusa2Loss(model, medusa)
    for matrix in (model.get_input_embeddings(), model.get_output_embeddings()):
        matrix.weight.requires_grad_(False)
    backbone = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def save(path: Path) -> None:
        with torch.no_grad():
            held = setting.held_batch.with_states(last_states(model, setting.held_batch))
        shutil.rmtree(path / TARGET, ignore_errors=True)
        beside = path.with_name(f"{path.name}-{TARGET}")
        save_target(beside, model, setting.facts)
        save_heads(path, medusa, ids, _facts(beside, setting), held)
        beside.replace(path / TARGET)

    def measure(path: Path) -> SpecStats:
        target = path / TARGET
        return setting.measure_with(setting.load(target), _facts(target, setting), path)

    groups = (
        Group(list(medusa.parameters())),
        Group(backbone, share=_RATE_SHARE, begins=_WARM_UP),
    )
    return Trainee(loss, loss, save, measure, groups, lambda path: moved(path, setting))


def check_epochs(epochs: int) -> None:
    """Raise ConfigError if the target would not learn at all."""
    if epochs <= _WARM_UP:
        raise ConfigError(
            f"epochs={epochs} is too few for medusa2, whose first epoch trains the heads alone: use "
            f"{_WARM_UP + 1} or more, or train medusa"
        )


def save_target(path: Path, model: Any, facts: TargetFacts) -> None:
    """Write a model in the precision of the target it comes from, with that one's tokenizer."""
    from transformers import AutoConfig

    assert facts.path is not None
    dtype = AutoConfig.from_pretrained(facts.path).dtype or torch.float32
    copy.deepcopy(model).to("cpu", dtype).save_pretrained(path)
    load_tokenizer(facts.path).save_pretrained(path)


def moved(path: Path, setting: Setting) -> dict[str, Any]:
    """Return how far the new target in `path` is from the old one: the mean divergence of its laws on the
    answers held out, in nats a token, and how often its likeliest token is another one.
    """
    from transformers import AutoModelForCausalLM

    where = setting.target.device
    model = AutoModelForCausalLM.from_pretrained(path / TARGET, dtype=torch.float32).to(where)
    vocabulary = model.get_output_embeddings().weight.detach()
    far, other = [], []
    with torch.no_grad():
        for number in range(len(setting.held)):
            old = setting.held_batch.part(number)
            new = old.with_states(last_states(model, old))
            far.append(divergence(old, new, vocabulary))
            likeliest = [batch.logits(*old.places(), vocabulary).argmax(-1) for batch in (old, new)]
            other.append((likeliest[0] != likeliest[1]).float())
    return {
        "notice": NOTICE,
        "mean_kl": round(torch.cat(far).mean().item(), 5),
        "other_token": round(torch.cat(other).mean().item(), 4),
    }


def _facts(target: Path, setting: Setting) -> TargetFacts:
    return replace(target_facts(target), name=f"{setting.facts.name}-medusa2")
