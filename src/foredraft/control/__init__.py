"""How many nodes each sequence may draft."""

from foredraft.control.budgets import AcceptanceBudget, FixedBudget
from foredraft.control.cost import PassCosts, pass_costs

__all__ = ["AcceptanceBudget", "FixedBudget", "PassCosts", "pass_costs"]
