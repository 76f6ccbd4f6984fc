"""How many nodes each sequence may draft."""

from foredraft.control.budgets import AcceptanceBudget
from foredraft.control.cost import PassCosts, pass_costs
from foredraft.control.fixed import FixedBudget
from foredraft.engine.protocols import Controller

__all__ = ["AcceptanceBudget", "Controller", "FixedBudget", "PassCosts", "pass_costs"]
