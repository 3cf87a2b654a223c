"""A family of optimisation problems: a network maps x to a feasible, cheap y."""

from .family import Family, FamilyDataModule, FamilyModule

__all__ = ["Family", "FamilyDataModule", "FamilyModule"]
