"""The one training loop, for heads and distilled drafts. A killed run goes on from its last checkpoint."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.progress import Progress, TaskID
from torch import Tensor, nn

from foredraft.errors import CheckpointError
from foredraft.train.collect import Answer
from foredraft.train.data import Batch, batches, stack
from foredraft.types import SpecStats

_SAVE_EVERY_S = 60.0
_WARM_UP = 20  # steps
_PATIENCE = 2  # epochs in a row that may fail to help: the measure is noisy, and the rate still falls
_DECAYING = 0.5  # share of the steps, at the end, in which the learning rate falls to a twentieth


class Loss(Protocol):
    """What is trained: the loss of a batch, and the share of right guesses of each level."""

    def __call__(self, batch: Batch, epoch: int) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """epochs at most: it ends when two in a row do not raise what drafting measures. tokens: of answers, a
    step.
    """

    epochs: int
    learning_rate: float
    tokens: int = 512
    seed: int = 0


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
class Trainee:
    """A module in training. save writes a draft that LLM can take; measure drafts with it on held-out
    prompts.
    """

    module: nn.Module
    loss: Loss
    save: Callable[[Path], None]
    measure: Callable[[Path], SpecStats]


def fit(
    trainee: Trainee, answers: Sequence[Answer], states: Tensor, plan: Plan, out: Path, progress: Progress
) -> Progressed:
    """Train and leave the best draft in `out`; a run that was killed goes on from its last checkpoint."""
    module = trainee.module
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=plan.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    checkpoint = out / "training.pt"
    done = _load(checkpoint, module, optimizer, plan)
    task = progress.add_task("training", total=None)
    while done.epoch < plan.epochs:
        some = batches(answers, plan.tokens, plan.seed + done.epoch)
        _epoch(trainee, optimizer, parameters, some, states, plan, done, checkpoint, (progress, task))
        trainee.save(out / "last")
        stats = trainee.measure(out / "last")
        best = max(done.mean_emitted, default=0.0)
        done.mean_emitted.append(stats.mean_emitted)
        done.accepted_at.append([count / max(stats.steps, 1) for count in stats.accepted_at])
        done.epoch, done.step = done.epoch + 1, 0
        if stats.mean_emitted > best:
            trainee.save(out / "best")
        progress.console.print(
            f"epoch {done.epoch}: mean_emitted {stats.mean_emitted:.2f}, accept_rate {stats.accept_rate:.2f}"
        )
        _save(checkpoint, module, optimizer, plan, done)
        if max(done.mean_emitted[-_PATIENCE:]) <= max(done.mean_emitted[:-_PATIENCE], default=0.0):
            break
    return done


def _epoch(
    trainee: Trainee,
    optimizer: torch.optim.Optimizer,
    parameters: list[nn.Parameter],
    some: Sequence[Sequence[Answer]],
    states: Tensor,
    plan: Plan,
    done: Progressed,
    checkpoint: Path,
    bar: tuple[Progress, TaskID],
) -> None:
    total, saved_s, start_s = len(some) * plan.epochs, time.monotonic(), time.monotonic() - done.seconds
    device = parameters[0].device.type
    for step in range(done.step, len(some)):
        number = len(some) * done.epoch + step
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate * schedule(number, total)
        with torch.autocast(device, torch.bfloat16):
            loss, right = trainee.loss(stack(some[step], states), done.epoch)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        done.step, done.seconds = step + 1, time.monotonic() - start_s
        done.losses.append(round(loss.item(), 4))
        shown = " ".join(f"{share:.2f}" for share in right.tolist())
        bar[0].update(
            bar[1], total=total, completed=number + 1, description=f"loss {loss:.2f}, right {shown}"
        )
        if time.monotonic() - saved_s > _SAVE_EVERY_S:
            saved_s = time.monotonic()
            _save(checkpoint, trainee.module, optimizer, plan, done)


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
        values: dict[str, Any] = torch.load(path, weights_only=True)
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
