"""Drafting methods: one file each, one signature."""

from foredraft.propose.draft_model import DraftModelProposer
from foredraft.propose.either import EitherProposer
from foredraft.propose.factory import (
    Drafting,
    LoadedDraft,
    best_draft,
    check_budget,
    check_draft,
    draft_dir,
    load_draft,
    make_drafting,
)
from foredraft.propose.ngram import NgramProposer
from foredraft.propose.suffix import SuffixProposer

__all__ = [
    "DraftModelProposer",
    "Drafting",
    "EitherProposer",
    "LoadedDraft",
    "NgramProposer",
    "SuffixProposer",
    "best_draft",
    "check_budget",
    "check_draft",
    "draft_dir",
    "load_draft",
    "make_drafting",
]
