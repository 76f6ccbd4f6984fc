"""The one training loop, for heads and distilled drafts. A killed run goes on from its last checkpoint."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from rich.progress import Progress
from torch import Tensor, nn

from foredraft.errors import CheckpointError
from foredraft.models.packed import is_slow
from foredraft.train.collect import Answer
from foredraft.train.data import Batch, batches, stack
from foredraft.train.processes import processes
from foredraft.types import SpecStats

_SAVE_EVERY_S = 60.0
_WARM_UP = 20  # steps
_PATIENCE = 2  # epochs in a row that may fail to help: the measure is noisy, and the rate still falls
_DECAYING = 0.5  # share of the steps, at the end, in which the learning rate falls to a twentieth


@dataclass(frozen=True, slots=True)
class Plan:
    """epochs at most: it ends when two in a row do not raise what drafting measures. tokens: of answers, a
    step. data: a hash of what is learnt from, so that a run does not go on with something else.
    """

    epochs: int
    learning_rate: float
    tokens: int = 512
    seed: int = 0
    data: str = ""


@dataclass(slots=True)
class Progressed:
    """How far a run has come, and its curves: of every step its loss, of every epoch what drafting gave."""

    epoch: int = 0
    step: int = 0  # within the epoch
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    accepted_at: list[list[float]] = field(default_factory=list)
    mean_emitted: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Group:
    """Parameters that learn at a share of the learning rate, from an epoch on."""

    parameters: Sequence[nn.Parameter]
    share: float = 1.0
    begins: int = 0


@dataclass(frozen=True)
class Trainee:
    """A module in training.

    loss: of a batch and an epoch, a loss and the share of right guesses of each level. save writes a draft
    that LLM can take; measure drafts with it on held-out prompts; describe says what else is to be known of
    it, as JSON values. groups: what of the module learns, all of it at one rate unless told.
    """

    module: nn.Module
    loss: nn.Module
    save: Callable[[Path], None]
    measure: Callable[[Path], SpecStats]
    groups: tuple[Group, ...] = ()
    describe: Callable[[Path], dict[str, Any]] = lambda _: {}


def fit(
    trainee: Trainee, answers: Sequence[Answer], states: Tensor, plan: Plan, out: Path, progress: Progress
) -> Progressed:
    """Train and leave the best draft in `out`; a run that was killed goes on from its last checkpoint.

    Of several processes each takes its own batches, and the first one saves and measures.
    """
    run = _Run(trainee, plan, out, progress)
    done = run.done
    while done.epoch < plan.epochs and not _stalled(done.mean_emitted):
        run.epoch(batches(answers, plan.tokens, plan.seed + done.epoch), states)
        run.measure()
    return done


class _Run:
    """A run of fit: what learns, where it is saved, and how far it has come."""

    def __init__(self, trainee: Trainee, plan: Plan, out: Path, progress: Progress) -> None:
        self.trainee, self.plan, self.out, self.progress = trainee, plan, out, progress
        learning = [parameter for parameter in trainee.module.parameters() if parameter.requires_grad]
        self.groups = trainee.groups or (Group(learning),)
        self.processes = processes(some_idle=any(group.begins for group in self.groups))
        self.loss = self.processes.prepare(trainee.loss)
        self.parameters = [parameter for group in self.groups for parameter in group.parameters]
        self.optimizer = torch.optim.AdamW(
            [{"params": group.parameters} for group in self.groups],
            lr=plan.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.0,
        )
        self.checkpoint = out / "training.pt"
        self.done = _load(self.checkpoint, trainee.module, self.optimizer, plan)
        self.bar = progress.add_task("training", total=None)

    def epoch(self, some: Sequence[Sequence[Answer]], states: Tensor) -> None:
        """Go on through the batches of an epoch; done.step counts those of all processes."""
        done, each = self.done, self.processes.num_processes
        total = len(some) * self.plan.epochs
        start_s = time.monotonic() - done.seconds
        saved_s, save_s = time.monotonic(), 0.0
        for first in range(done.step, len(some), each):
            self._set_rates(len(some), first)
            own = some[(first + self.processes.process_index) % len(some)]
            right = self._step(stack(own, states).to(self.processes.device))
            done.step, done.seconds = first + each, time.monotonic() - start_s
            shown = " ".join(f"{share:.2f}" for share in right.tolist())
            said = f"loss {done.losses[-1]:.2f}, right {shown}"
            completed = len(some) * done.epoch + first + 1
            self.progress.update(self.bar, total=total, completed=completed, description=said)
            # A large checkpoint is written less often, so that it takes no more than a tenth of the time.
            if time.monotonic() - saved_s > max(_SAVE_EVERY_S, 10 * save_s):
                begun_s = time.monotonic()
                self.save()
                saved_s = time.monotonic()
                save_s = saved_s - begun_s

    def measure(self) -> None:
        """End an epoch: draft with what it made, keep that if it is the best so far, and save."""
        done, last, stats = self.done, self.out / "last", [SpecStats()]
        if self.processes.is_main_process:
            self.trainee.save(last)
            stats = [self.trainee.measure(last)]
            if stats[0].mean_emitted > max(done.mean_emitted, default=0.0):
                self.trainee.save(self.out / "best")
        (found,) = broadcast_object_list(stats)
        done.mean_emitted.append(found.mean_emitted)
        done.accepted_at.append([count / max(found.steps, 1) for count in found.accepted_at])
        done.epoch, done.step = done.epoch + 1, 0
        self.save()
        if self.processes.is_main_process:
            self.progress.console.print(
                f"epoch {done.epoch}: mean_emitted {found.mean_emitted:.2f}, "
                f"accept_rate {found.accept_rate:.2f}"
            )

    def save(self) -> None:
        """Save how far this run has come, in the first process."""
        if self.processes.is_main_process:
            _save(self.checkpoint, self.trainee.module, self.optimizer, self.plan, self.done)

    def _step(self, batch: Batch) -> Tensor:
        """Learn from a batch; return the share of right guesses of each level."""
        device = self.processes.device
        with torch.autocast(device.type, torch.bfloat16, enabled=not is_slow(torch.bfloat16, device)):
            loss, right = self.loss(batch, self.done.epoch)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        shared: Tensor = self.processes.reduce(loss.detach(), "mean")
        self.done.losses.append(round(shared.item(), 4))
        return right  # type: ignore[no-any-return]

    def _set_rates(self, batch_count: int, first: int) -> None:
        """Set the learning rates for the batches from `first` on; a group's schedule begins when it does."""
        each = self.processes.num_processes
        for group, settings in zip(self.groups, self.optimizer.param_groups, strict=True):
            number = batch_count * (self.done.epoch - group.begins) + first
            total = batch_count * (self.plan.epochs - group.begins)
            rate = schedule(number // each, total // each) if number >= 0 else 0.0
            settings["lr"] = self.plan.learning_rate * group.share * rate


def _stalled(rates: Sequence[float]) -> bool:
    """True if the last epochs have not raised what drafting gives."""
    return len(rates) > _PATIENCE and max(rates[-_PATIENCE:]) <= max(rates[:-_PATIENCE])


def schedule(step: int, total: int) -> float:
    """Return the learning rate of a step as a share of the highest."""
    falling = (total - step) / max(1.0, total * _DECAYING)
    return min(1.0, (step + 1) / _WARM_UP, max(0.05, falling))


def _save(
    path: Path, module: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, done: Progressed
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".partial")
    values = {
        "module": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "plan": json.dumps(asdict(plan)),
        "done": json.dumps(asdict(done)),
    }
    torch.save(values, beside)
    os.replace(beside, path)


def _load(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> Progressed:
    if not path.exists():
        return Progressed()
    try:
        values: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        module.load_state_dict(values["module"])
        optimizer.load_state_dict(values["optimizer"])
        begun, done = json.loads(values["plan"]), Progressed(**json.loads(values["done"]))
    except Exception as error:
        raise CheckpointError(
            f"{path} is no checkpoint of this training: {error}; remove it to begin anew"
        ) from error
    if begun != asdict(plan):
        raise CheckpointError(
            f"{path} was begun with {begun}, not {asdict(plan)}: give the same options, or remove it"
        )
    return done
