"""Each mutant can be put in, and names a test that exists; ``make mutants`` runs them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from tests.harness import in_test_all
from tests.mutants import all_mutants

ROOT = Path(__file__).parent.parent


@cache
def functions_in(file: str) -> set[str]:
    """The names of the functions of a test file."""
    return {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}


def test_each_mutant_changes_one_place_of_its_file() -> None:
    texts = {mutant.path: (ROOT / mutant.path).read_text() for mutant in all_mutants()}
    stale = [mutant for mutant in all_mutants() if mutant.applied(texts[mutant.path]) in ("", texts[mutant.path])]
    assert stale == []
    assert len(set(all_mutants())) == len(all_mutants()) >= 60


@in_test_all
def test_each_file_with_a_mutant_can_be_parsed() -> None:
    for mutant in all_mutants():
        ast.parse(mutant.applied((ROOT / mutant.path).read_text()), mutant.path)


def test_each_mutant_names_a_test_that_exists() -> None:
    for mutant in all_mutants():
        file, _, name = mutant.killed_by.partition("::")
        assert name.partition("[")[0] in functions_in(file), mutant
