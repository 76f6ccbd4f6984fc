"""How many nodes each sequence may draft."""

from foredraft.control.budgets import AcceptanceBudget, FixedBudget

__all__ = ["AcceptanceBudget", "FixedBudget"]
