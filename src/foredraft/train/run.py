"""From prompts to a draft: answers, features, training, measuring, provenance. What is done is not done
again.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import json
import math
import platform
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

import foredraft
from foredraft import zoo
from foredraft.errors import ConfigError
from foredraft.models import HFCausal, load_target, load_tokenizer
from foredraft.models.checkpoint import TargetFacts, target_facts
from foredraft.propose.factory import draft_dir
from foredraft.propose.heads import fingerprint
from foredraft.train import recipes
from foredraft.train.collect import Answer, AnswerFile, collect
from foredraft.train.data import split, stack
from foredraft.train.loop import Plan, Progressed, Trainee, fit
from foredraft.train.medusa2 import NOTICE, check_epochs, medusa2
from foredraft.train.processes import processes
from foredraft.train.prompts import load_prompts

KINDS: dict[str, Callable[[recipes.Setting, Sequence[Answer], int], Trainee]] = {
    "eagle": recipes.eagle,
    "medusa": recipes.medusa,
    "medusa2": medusa2,
    "draft": recipes.draft,
}
LEARNING_RATES = {"eagle": 2e-3, "medusa": 1e-3, "medusa2": 1e-3, "draft": 5e-4}
_HELD_OUT = 0.02
_DRAFT_VOCAB = 8192
_MEASURED = 16  # held-out prompts that are answered after every epoch


@dataclass(frozen=True, slots=True)
class Options:
    """What a run may be told. longest: prompts of more tokens are left out, and those that the context cannot
    hold; limit: use so many prompts; draft_vocab_size: None is that of the draft to start from, or 8192;
    start_from: a draft, as LLM takes it.
    """

    epochs: int = 2
    max_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0, 1.0)
    longest: int = 640
    limit: int | None = None
    draft_vocab_size: int | None = None
    start_from: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("max_tokens", 2), ("longest", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} is too small: use {least} or more")
        if self.limit is not None and self.limit < 2:
            raise ConfigError(f"limit={self.limit} is too small: one prompt to train on, one to hold out")
        size = self.draft_vocab_size
        if size is not None and size < 2:
            raise ConfigError(f"draft_vocab_size={size} is too small: use 2 or more")
        if size is not None and self.start_from is not None:
            raise ConfigError(
                f"draft_vocab_size={size} with start_from={self.start_from!r}: a draft keeps its vocabulary; "
                "leave one of the two out"
            )
        if not self.temperatures or not all(0 <= each < math.inf for each in self.temperatures):
            raise ConfigError(f"temperatures={self.temperatures}: give one or more, 0 (greedy) or higher")


def train(
    kind: str, files: Sequence[Path], model: str, out: Path, options: Options, progress: Progress
) -> dict[str, Any]:
    """Make a draft of one kind in `out`, which LLM(draft=out) takes; return its provenance.

    "medusa2" makes a new target too, in `out`/target. Raises ConfigError, CheckpointError, CapacityError or
    what loading a model raises. A run that was killed goes on when it is started again with the same options.
    Of several processes (see processes.py) the first returns the provenance, the others nothing.
    """
    _keep_freed_memory()
    if kind not in KINDS:
        hint = "; draft makes what --draft distilled uses" if kind == "distilled" else ""
        raise ConfigError(f"kind={kind!r} is unknown: use {', '.join(KINDS)}{hint}")
    group = processes()
    if kind == "medusa2":
        check_epochs(options.epochs)
        if group.is_main_process:
            progress.console.print(NOTICE)
    path = zoo.resolve(model)
    target = load_target(path, device=str(group.device))
    facts = replace(target_facts(path), name=str(model))
    start = None if options.start_from is None else draft_dir(options.start_from, target)
    work = out / "work"
    with group.main_process_first():  # the others find all prompts answered
        collected, answers = _answers(target, facts, files, work / "answers", options, progress)
    learning, held = _both(*split(answers, _HELD_OUT))
    if group.is_main_process:
        left = len(answers) - len(learning) - len(held)
        progress.console.print(
            f"{len(answers)} answers: {len(learning)} to learn from, {len(held)} to measure on, "
            f"{left} left out (a single token, or held out beyond {_MEASURED})"
        )
    held_batch = stack(held, collected.states()).to(target.device)
    setting = recipes.Setting(target, facts, _modules(path, target), held, held_batch, start)
    vocab = options.draft_vocab_size or _DRAFT_VOCAB
    plan = Plan(options.epochs, LEARNING_RATES[kind], data=_digest(kind, vocab, options.start_from, learning))
    with torch.random.fork_rng():
        torch.manual_seed(plan.seed)
        trainee = KINDS[kind](setting, learning, vocab)
    done = fit(trainee, learning, collected.states(), plan, work, progress)
    if not group.is_main_process:
        return {}
    shutil.copytree(work / "best", out, dirs_exist_ok=True)
    record = provenance(kind, model, files, options, plan, done, learning, held)
    record |= trainee.describe(out)
    (out / "provenance.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def _answers(
    target: HFCausal,
    facts: TargetFacts,
    files: Sequence[Path],
    home: Path,
    options: Options,
    progress: Progress,
) -> tuple[AnswerFile, list[Answer]]:
    """Return a file with the states that recipes read, and the target's answers to the prompts of some files,
    which may not be all that are in it.
    """
    assert facts.path is not None
    longest = min(options.longest, target.max_len - 2)  # nothing is learnt from an answer of one token
    prompts = load_prompts(files, load_tokenizer(facts.path), longest=longest)[: options.limit]
    layers = (*recipes.fused_layers(facts.num_layers), facts.num_layers)
    made_by = {
        "target": fingerprint(facts),
        "hidden_layers": layers,
        "temperatures": options.temperatures,
        "max_tokens": options.max_tokens,
    }
    collected = AnswerFile(home, facts.hidden_size * len(layers), made_by)
    collect(
        target,
        prompts,
        collected,
        hidden_layers=layers,
        temperatures=options.temperatures,
        max_tokens=options.max_tokens,
        progress=progress,
    )
    wanted = {prompt.key for prompt in prompts}
    return collected, [answer for answer in collected.answers if answer.key in wanted]


def _digest(kind: str, vocab: int, start_from: str | None, learning: Sequence[Answer]) -> str:
    """Return a hash of what a run learns from, and in which order, and of what it begins with."""
    told = json.dumps([kind, vocab, start_from, [answer.key for answer in learning]])
    return hashlib.blake2b(told.encode(), digest_size=8).hexdigest()


def provenance(
    kind: str,
    model: str,
    files: Sequence[Path],
    options: Options,
    plan: Plan,
    done: Progressed,
    learning: Sequence[Answer],
    held: Sequence[Answer],
) -> dict[str, Any]:
    """Return where a draft comes from, as plain JSON values."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    every = max(1, len(done.losses) // 200)
    begun = f" --start-from {options.start_from}" if options.start_from is not None else ""
    return {
        "kind": kind,
        "target": model,
        "command": f"foredraft train {kind} {' '.join(path.name for path in files)} --model {model}{begun}",
        "options": asdict(options) | {"temperatures": list(options.temperatures)},
        "plan": asdict(plan),
        "prompts_sha256": digest.hexdigest(),
        "answers": len(learning),
        "answer_tokens": sum(len(answer.token_ids) for answer in learning),
        "held_out": len(held),
        "training_s": round(done.seconds),
        "steps": len(done.losses),
        "losses": done.losses[::every],
        "held_out_accepted_at": done.accepted_at,
        "held_out_mean_emitted": done.mean_emitted,
        "versions": {
            "foredraft": foredraft.__version__,
            "torch": torch.__version__,
            "transformers": importlib.metadata.version("transformers"),
            "python": platform.python_version(),
        },
    }


def _both(learning: list[Answer], held: list[Answer]) -> tuple[list[Answer], list[Answer]]:
    """Return answers to learn from and a few to measure on; raises ConfigError if there are not both."""
    usable = [answer for answer in learning if len(answer.token_ids) > 1]
    some = [answer for answer in held if len(answer.token_ids) > 1][:_MEASURED] or usable[-1:]
    usable = [answer for answer in usable if answer not in some]
    if not usable:
        raise ConfigError(
            "no prompt is left to train on after those held out: give more prompts, or raise the limits that "
            "left some out"
        )
    return usable, some


def _modules(path: Path, target: HFCausal) -> Any:
    """Return the target's transformers module in float32, whose weights drafts begin with."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(target.device)


def _keep_freed_memory() -> None:
    """Tell glibc not to hand memory back after every step: clearing it anew takes up to half of a step."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for option, value in ((-3, 32 << 20), (-1, 2**31 - 1), (-2, 256 << 20)):  # mmap, trim, top pad
            libc.mallopt(option, value)
