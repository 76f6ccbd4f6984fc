"""How many nodes each sequence may draft."""

from foredraft.control.budgets import PRIOR, AcceptanceBudget, FixedBudget
from foredraft.control.cost import PassCosts, pass_costs

__all__ = ["PRIOR", "AcceptanceBudget", "FixedBudget", "PassCosts", "pass_costs"]
