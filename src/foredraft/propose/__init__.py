"""Drafting methods: one file each, one signature."""

from foredraft.propose.draft_model import DraftModelProposer
from foredraft.propose.ngram import NgramProposer
from foredraft.propose.vocabulary import check_same_vocabulary

__all__ = ["DraftModelProposer", "NgramProposer", "check_same_vocabulary"]
