"""Mutants of the logic, and the tests that kill them: :func:`all_mutants`; ``python -m tests.mutants`` runs them.

Each module here but this one has a list ``MUTANTS``. Where a redesign moves a line, its mutant moves with it.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from tests.mutants.mutant import Mutant


def all_mutants() -> list[Mutant]:
    """The mutants of all lists."""
    names = [module.name for module in iter_modules(__path__) if not module.name.startswith("_")]
    lists: list[list[Mutant]] = [getattr(import_module(f"{__name__}.{name}"), "MUTANTS", []) for name in names]
    return [mutant for each in lists for mutant in each]
