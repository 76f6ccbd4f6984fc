"""From the name of a draft to a proposer and the controller that fits it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from foredraft import zoo
from foredraft.control import AcceptanceBudget, FixedBudget, pass_costs
from foredraft.engine.protocols import Controller, Proposer
from foredraft.errors import CheckpointError, ConfigError
from foredraft.models import HFCausal, load_target, load_tokenizer
from foredraft.models.checkpoint import is_head, target_facts
from foredraft.models.formats.files import read_json
from foredraft.params import whole
from foredraft.propose.distilled import complete, is_distilled
from foredraft.propose.draft_model import DraftModelProposer, check_tree
from foredraft.propose.either import EitherProposer
from foredraft.propose.heads import EagleDraft, MedusaDraft, load_head, target_record
from foredraft.propose.ngram import LONGEST, NgramProposer
from foredraft.propose.other_vocabulary import OtherVocabularyDraft
from foredraft.propose.suffix import MEMORY_TOKENS, SuffixProposer
from foredraft.propose.vocabulary import difference
from foredraft.types import Source

_LOOKUPS: dict[str, Callable[[], NgramProposer | SuffixProposer]] = {
    "ngram": NgramProposer,
    "suffix": SuffixProposer,
    "suffix-shared": lambda: SuffixProposer(memory_tokens=MEMORY_TOKENS),
}
_LONGEST_CHAIN, _LONGEST_TREE = 8, 15  # most nodes that "auto" lets a model or head draft

LoadedDraft = HFCausal | OtherVocabularyDraft | EagleDraft | MedusaDraft


@dataclass(frozen=True, slots=True)
class Drafting:
    """What the engine needs to draft; both None for plain decoding."""

    proposer: Proposer | None = None
    controller: Controller | None = None


def check_draft(draft: str | Path | None) -> None:
    """Raise ConfigError for a name that is no draft, so that it is told before anything is loaded."""
    _, other = _parts(draft, None)
    name = "" if other is None else str(other)
    if name in ("", *zoo.SHIPPED_KINDS, *zoo.MODELS) or "/" in name or name.endswith(".gguf"):
        return
    if not Path(name).expanduser().exists():
        kinds = ", ".join((*_LOOKUPS, *zoo.SHIPPED_KINDS))
        raise ConfigError(
            f"draft={str(draft)!r} is unknown: use auto, none, {kinds}, a directory or a model's name; a "
            "lookup goes second, behind a head or model, as in eagle+suffix"
        )


def check_budget(budget: int | Literal["auto"], tree: tuple[int, ...] | None) -> None:
    """Raise ConfigError for what is no budget or no tree, whatever drafts."""
    if budget != "auto":
        whole("budget", budget, "0 (off) to 256, or 'auto'", 0, 256)
    check_tree(tree)


def load_draft(draft: str | Path | None, *, target: HFCausal, tokenizer: Any) -> LoadedDraft | None:
    """Load the head or model that `draft` names; None if it names neither.

    "eagle", "medusa" and "distilled" are what is shipped for the target; of "eagle+suffix" it is the head. A
    model may have another vocabulary than the target. Raises ConfigError if nothing is shipped,
    CheckpointError for a head or distilled draft of another target, or what loading a model raises.
    """
    check_draft(draft)
    _, draft = _parts(draft, target)
    if draft is None:
        return None
    dtype = str(target.dtype).removeprefix("torch.")
    path = draft_dir(draft, target)
    if is_head(path):
        return load_head(path, target_facts(Path(target.name)), target.dtype, target.device)
    if is_distilled(path):
        path = complete(path, target_facts(Path(target.name)))
        return load_target(path, dtype=dtype, device=str(target.device))
    own = load_tokenizer(path)
    model, differs = load_target(path, dtype=dtype, device=str(target.device)), difference(own, tokenizer)
    return model if differs is None else OtherVocabularyDraft(model, own, tokenizer, differs)


def make_drafting(
    draft: str | Path | None,
    model: LoadedDraft | None,
    *,
    vocab_size: int,
    kv_tokens: int,
    budget: int | Literal["auto"] = "auto",
    tree: tuple[int, ...] | None = None,
    target: HFCausal | None = None,
) -> Drafting:
    """Return the drafting of `draft`: None or "none", "ngram", "suffix" (over the request's own text),
    "suffix-shared" (over earlier answers too), the name of `model`, as load_draft returned it, that name and
    a lookup's, joined by "+" (each step drafts by what promises more), or "auto" (best_draft).

    A draft model's cache holds kv_tokens positions, as the target's does. tree: level sizes, for draft models
    only. target: whose passes are timed for budget "auto"; without one they are guessed at first. Raises
    ConfigError on options.
    """
    check_budget(budget, tree)
    if tree is not None and isinstance(model, OtherVocabularyDraft):
        raise ConfigError(
            f"tree={tree} needs a draft model of the target's vocabulary, and {draft!r} has another "
            f"({model.difference}), from which a chain is drafted: leave tree out"
        )
    if tree is not None and not isinstance(model, HFCausal):
        raise ConfigError(f"tree={tree} needs a draft model, and draft is {draft!r}: leave tree out")
    name, other = _parts(draft, target)
    lookup = None if name is None else _LOOKUPS[name]()
    if model is None or other is None:
        proposer: Proposer | None = lookup
        source = Source(LONGEST)
    else:
        trained = draft_dir(other, target) if target is not None and budget == "auto" else None
        source = _source(model, tree, trained)
        proposer = _proposer(model, vocab_size=vocab_size, kv_tokens=kv_tokens, tree=tree)
        if lookup is not None:
            proposer = EitherProposer(lookup, proposer, source)
    if proposer is None:
        return Drafting()
    if budget != "auto":
        return Drafting(proposer, FixedBudget(budget))
    costs = None if target is None else pass_costs(target, target.name)
    return Drafting(proposer, AcceptanceBudget(source, costs=costs))


def _parts(draft: str | Path | None, target: HFCausal | None) -> tuple[str | None, str | Path | None]:
    """Return the lookup and the head or model that a draft names."""
    if draft == "auto":
        draft = "suffix" if target is None else best_draft(target)
    if draft is None or draft == "none":
        return None, None
    if draft in _LOOKUPS:
        return str(draft), None
    first, _, last = str(draft).rpartition("+")
    if first and last in _LOOKUPS:
        return last, first
    first, _, last = str(draft).partition("+")
    return (first, last) if last and first in _LOOKUPS else (None, draft)


def _proposer(
    model: LoadedDraft, *, vocab_size: int, kv_tokens: int, tree: tuple[int, ...] | None
) -> Proposer:
    if isinstance(model, EagleDraft | MedusaDraft):
        return model.proposer(kv_tokens)
    if isinstance(model, OtherVocabularyDraft):
        return model.proposer(vocab_size=vocab_size, kv_tokens=kv_tokens)
    return DraftModelProposer(model, vocab_size=vocab_size, kv_tokens=kv_tokens, tree=tree)


def _source(model: LoadedDraft, tree: tuple[int, ...] | None, path: Path | None) -> Source:
    """Return how a model drafts, and what its training says of that."""
    is_tree = tree is not None or isinstance(model, EagleDraft | MedusaDraft)
    longest = sum(tree) if tree else _LONGEST_TREE if is_tree else _LONGEST_CHAIN
    known = None if path is None else _first_accepted(path)
    source = Source(longest, tree=is_tree)
    return source if known is None else replace(source, prior=known)


def _first_accepted(path: Path) -> float | None:
    """Return how often the first guess of a trained draft was accepted when it was measured, if that was."""
    try:
        record = read_json(path / "provenance.json")
        _, best = max(zip(record["held_out_mean_emitted"], record["held_out_accepted_at"], strict=True))
        return min(max(float(best[0]), 0.01), 0.99)
    except (CheckpointError, KeyError, TypeError, ValueError, IndexError):
        return None


def best_draft(target: HFCausal) -> str:
    """Return what drafts best without a file of the user's: the shipped EAGLE head, if there is one for the
    target, and a lookup.
    """
    try:
        shipped("eagle", target.name)
    except (ConfigError, CheckpointError):
        return "suffix"
    return "eagle+suffix"


def draft_dir(draft: str | Path, target: HFCausal) -> Path:
    """Return the directory of a head or model that a draft names; raises as load_draft does."""
    if draft in zoo.SHIPPED_KINDS:
        return shipped(str(draft), target.name)
    path = Path(draft).expanduser()
    return path if is_head(path) or is_distilled(path) else zoo.resolve(draft)


@lru_cache(maxsize=8)  # asked of more than once a start, and it reads every norm
def _known_target(path: Path) -> dict[str, Any]:
    return target_record(target_facts(path))


def shipped(kind: str, target: str) -> Path:
    """Return the directory of the draft of one kind that is shipped for a target directory.

    Raises ConfigError if there is none.
    """
    record = _known_target(Path(target))
    for path in zoo.shipped(kind):
        noted = read_json(path / "config.json")["foredraft"]["target"]
        if all(noted[name] == record[name] for name in noted if name != "name"):
            return path
    raise ConfigError(
        f"draft={kind!r}: none is shipped for {target}; train one with `foredraft train` and give its "
        "directory, or use draft='ngram'"
    )
