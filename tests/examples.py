"""The examples of the documentation: the blocks of code of a page, as a test may run them.

A block stands alone, unless a comment on the line above it says how it continues the block before it::

    <!-- example: after the one before -->          its lines run after that block, and use its names
    <!-- example: in the loop of the one before -->  its lines end the body of the loop in which that block ends

Or the comment says why the block is not run like the others:

    <!-- example: tests/docs/test_pages.py::test_x -->  a test of its own runs it
    <!-- example: not run, REASON -->

A block below a paragraph that ends with "Before:" is what a reader has before any change. It may fail or hang.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import symtable
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import join

DOCS = Path(join.__file__).parent.parent / "docs"
_MARK = re.compile(r"<!-- example: (.*) -->")
_AFTER, _IN_LOOP = "after the one before", "in the loop of the one before"


@dataclass(frozen=True)
class Example:
    """A block of code.

    Attributes:
        name: The heading above it, and its number if it is not the first one below that heading; without blocks that
            are ``before``.
        code: Its code, behind the code that it continues.
        before: Whether it is what a reader has before any change.
        apart: The test that runs it, or why none does, if it is not run like the others.
    """

    name: str
    code: str
    before: bool = False
    apart: str = ""


def examples_of(page: str, language: str = "python") -> list[Example]:
    """Return the blocks of a page in a language, such as those of ``frameworks/other.md``."""
    found: list[Example] = []
    heading, above, start, opening = "", "", 0, ""
    lines = (DOCS / page).read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if opening:
            if line == opening:
                own, opening = "\n".join(lines[start - 1 : number - 1]) + "\n", ""
                if re.match(rf"`+{language}\b", lines[start - 2]):
                    found.append(_example(found, heading, above, own))
        elif fence := re.match(r"(`{3,})", line):
            opening, start = fence[1], number + 1
        elif line.startswith("#"):
            heading = line.lstrip("# ")
        elif line:
            above = line
    return found


def _example(found: list[Example], heading: str, above: str, own: str) -> Example:
    before = above.endswith("Before:")
    others = [each for each in found if re.sub(r" \d+$", "", each.name) == heading and not each.before]
    name = heading if before or not others else f"{heading} {len(others) + 1}"
    match = _MARK.match(above)
    mark = match[1] if match else ""
    if mark == _AFTER:
        own = found[-1].code + own
    elif mark == _IN_LOOP:
        own = in_loop_of(found[-1].code, own)
    return Example(name, own, before, "" if mark in (_AFTER, _IN_LOOP) else mark)


def in_loop_of(code: str, lines: str) -> str:
    """Return code that ends in the body of a loop, with more lines at the end of that body."""
    last = code.splitlines()[-1]
    return code + textwrap.indent(lines, last[: len(last) - len(last.lstrip())])


def after(diff: str) -> str:
    """Return the code that a difference leads to."""
    return "".join(line[1:] or "\n" for line in diff.splitlines(keepends=True) if line[0] != "-")


def examples_in_docstrings(*modules: ModuleType) -> list[Example]:
    """The blocks in the docstrings of the public names of modules."""
    documented: dict[str, Any] = {}
    for module in modules:
        for name in module.__all__:
            value = getattr(module, name)
            documented[name] = value
            for member, each in vars(value).items() if inspect.isclass(value) else ():
                if not member.startswith("_") and not inspect.isclass(each):
                    documented[f"{name}.{member}"] = each
    return [
        Example(f"{name} {number}" if number > 1 else name, code)
        for name, value in documented.items()
        for number, code in enumerate(_indented(inspect.getdoc(value) or ""), 1)
    ]


def _indented(text: str) -> Iterator[str]:
    """Each block that is indented below a line which ends with two colons."""
    for block in re.finditer(r"::\n\n((?:    +.*\n|\n)+)", f"{text}\n"):
        yield textwrap.dedent(block[1])


def needed(code: str) -> set[str]:
    """The names that code uses before it defines them, or without."""
    module = symtable.symtable(code, "example", "exec")
    own = {symbol.get_name() for symbol in module.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    return {name for name in _used(module) if name not in own and not hasattr(builtins, name)} | _rebound(code)


def _used(table: symtable.SymbolTable) -> Iterator[str]:
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (table.get_type() == "module" or symbol.is_global()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _used(child)


def _rebound(code: str) -> set[str]:
    """The names that are first assigned by a statement which uses them, such as ``model = wrap(model)``."""
    found, bound = set[str](), set[str]()
    for statement in (each for each in ast.walk(ast.parse(code)) if isinstance(each, (ast.Assign, ast.AugAssign))):
        is_sum = isinstance(statement, ast.AugAssign)
        targets = [statement.target] if is_sum else statement.targets
        names = [each for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
        assigned = {each.id for each in names if isinstance(each.ctx, ast.Store)}
        used = {each.id for each in ast.walk(statement.value) if isinstance(each, ast.Name)}
        found |= (assigned if is_sum else assigned & used) - bound
        bound |= assigned
    return found
