"""What each kind of draft is, how it learns, and how it drafts while it is measured."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import CheckpointError
from foredraft.models import HFCausal, load_target
from foredraft.models.checkpoint import HeadFiles, TargetFacts, read_head
from foredraft.models.heads import EagleConfig, EagleLayer, MedusaHeads
from foredraft.propose.distilled import complete, save_distilled
from foredraft.propose.draft_model import DraftModelProposer
from foredraft.propose.heads import load_eagle, load_head, load_medusa, save_eagle, save_medusa, token_ids
from foredraft.propose.medusa import RANKS, calibrate
from foredraft.train.collect import Answer
from foredraft.train.data import Batch
from foredraft.train.distil import DistilLoss, chosen_layers, cut, earlier
from foredraft.train.eagle import FIRST, EagleLoss, from_last_layer
from foredraft.train.loop import Trainee
from foredraft.train.measure import draft_with, kv_tokens
from foredraft.train.medusa import MedusaLoss, rank_hits
from foredraft.types import SpecStats

EAGLE_LEVELS = 4
MEDUSA_HEADS, MEDUSA_LAYERS, MEDUSA_NODES = 4, 2, 64
DRAFT_LAYERS = 4
_MEASURED_BUDGET = 10  # nodes of a tree
DRAFT_MEASURED = 4  # of a chain


@dataclass(frozen=True)
class Setting:
    """What a recipe starts from: the target as it runs, its facts, its transformers module in float32 and
    config, the answers held out, and the directory of an earlier draft of its kind, if it is to go on.
    """

    target: HFCausal
    facts: TargetFacts
    model: Any
    held: Sequence[Answer]
    held_batch: Batch
    start: Path | None = None

    def measure(self, path: Path) -> SpecStats:
        """Draft with the head in a directory."""
        return self.measure_with(self.target, self.facts, path)

    def measure_with(self, target: HFCausal, facts: TargetFacts, path: Path) -> SpecStats:
        """Draft for a target with the head in a directory."""
        draft = load_head(path, facts, target.dtype, target.device)
        return draft_with(target, draft.proposer(kv_tokens(self.held)), self.held, _MEASURED_BUDGET)

    def started(self, kind: str) -> HeadFiles | None:
        """Return the head to start from; raises CheckpointError if it is of another kind, or damaged."""
        if self.start is None:
            return None
        files = read_head(self.start)
        if files.kind != kind:
            raise CheckpointError(f"{self.start} holds {files.kind} and {kind} is trained: start from {kind}")
        return files

    def load(self, path: Path) -> HFCausal:
        """Load another model to run where the target does, as it does."""
        dtype = str(self.target.dtype).removeprefix("torch.")
        return load_target(path, dtype=dtype, device=str(self.target.device))


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
    """An EAGLE head, begun as the target's last layer or an earlier head."""
    facts, model, files = setting.facts, setting.model, setting.started("eagle")
    layers = fused_layers(facts.num_layers)
    if files is None:
        head = EagleLayer(EagleConfig.like(model.config, layers, draft_vocab_size))
        head.set_vocabulary(frequent_tokens(answers, head.config.draft_vocab_size, facts.vocab_size))
        from_last_layer(head, model)
    else:
        head = load_eagle(files, facts, torch.float32)
        if head.config.hidden_layers != layers:
            raise CheckpointError(
                f"{files.path} reads hidden states {head.config.hidden_layers}, and {layers} are recorded "
                "here: start from a head that was trained here, or from none"
            )
    embedding = model.get_input_embeddings().weight.detach()
    first = FIRST if files is None else EAGLE_LEVELS
    loss = EagleLoss(head, embedding, model.get_output_embeddings().weight.detach(), EAGLE_LEVELS, first)
    max_len = setting.target.max_len
    return Trainee(head, loss, lambda path: save_eagle(path, head, facts, max_len=max_len), setting.measure)


def medusa(setting: Setting, answers: Sequence[Answer], draft_vocab_size: int) -> Trainee:
    """Medusa heads, and a tree calibrated on the answers held out."""
    loss, ids = medusa_loss(setting, answers, draft_vocab_size)

    def save(path: Path) -> None:
        save_heads(path, loss, ids, setting.facts, setting.held_batch)

    return Trainee(loss.heads, loss, save, setting.measure)


def medusa_loss(
    setting: Setting, answers: Sequence[Answer], draft_vocab_size: int
) -> tuple[MedusaLoss, Tensor]:
    """Return the loss of Medusa heads, new or earlier ones, and the tokens they draft from, int64 [draft
    vocab].
    """
    facts, files = setting.facts, setting.started("medusa")
    if files is None:
        ids = frequent_tokens(answers, min(draft_vocab_size, facts.vocab_size), facts.vocab_size)
        heads = MedusaHeads(facts.hidden_size, MEDUSA_HEADS, MEDUSA_LAYERS)
    else:
        ids = token_ids(files, facts)
        heads = load_medusa(files, facts, torch.float32)
    return MedusaLoss(heads, setting.model.get_output_embeddings().weight.detach()[ids]), ids


def save_heads(path: Path, loss: MedusaLoss, ids: Tensor, facts: TargetFacts, held: Batch) -> None:
    """Write Medusa heads with a tree calibrated on a batch."""
    tree = calibrate(rank_hits(loss, held, RANKS), MEDUSA_NODES)
    save_medusa(path, loss.heads, ids, tree, facts)


def draft(setting: Setting, answers: Sequence[Answer], draft_vocab_size: int) -> Trainee:
    """A model of some of the target's layers, or an earlier one, which drafts from the tokens that answers
    use most.
    """
    facts, target = setting.facts, setting.target
    if setting.start is None:
        ids = frequent_tokens(answers, min(draft_vocab_size, facts.vocab_size), facts.vocab_size)
        small = cut(setting.model, chosen_layers(facts.num_layers, min(DRAFT_LAYERS, facts.num_layers - 1)))
    else:
        small, ids = earlier(setting.start, facts)
    loss = DistilLoss(small, setting.model.get_output_embeddings().weight.detach()[ids])

    def save(path: Path) -> None:
        state = {name: value.to("cpu", torch.bfloat16) for name, value in small.state_dict().items()}
        save_distilled(path, small.config.to_dict() | {"dtype": "bfloat16"}, state, ids, facts)

    def measure(path: Path) -> SpecStats:
        whole, tokens = complete(path, facts), kv_tokens(setting.held)
        try:
            proposer = DraftModelProposer(setting.load(whole), vocab_size=target.vocab_size, kv_tokens=tokens)
            return draft_with(target, proposer, setting.held, DRAFT_MEASURED)
        finally:
            shutil.rmtree(whole, ignore_errors=True)  # the next epoch's is another

    return Trainee(small, loss, save, measure)
