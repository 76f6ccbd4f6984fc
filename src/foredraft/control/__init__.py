"""How many nodes each sequence may draft."""

from foredraft.control.budgets import AcceptanceBudget
from foredraft.control.cost import PassCosts, pass_costs
from foredraft.control.fixed import FixedBudget

__all__ = ["AcceptanceBudget", "FixedBudget", "PassCosts", "pass_costs"]
