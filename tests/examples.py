"""The examples of the documentation: the blocks of code of a page, as a test may run them.

A block stands alone, unless a comment on the line above it says how it continues the block before it::

    <!-- example: after the one before -->          its lines run after that block, and use its names
    <!-- example: in the loop of the one before -->  its lines end the body of the loop in which that block ends

A block below a paragraph that ends with "Before:" is what a reader has before any change. It may fail or hang.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

import join

DOCS = Path(join.__file__).parent.parent / "docs"
_MARK = re.compile(r"<!-- example: (after|in the loop of) the one before -->")


@dataclass(frozen=True)
class Example:
    """A block of code.

    Attributes:
        name: The heading above it, and its number if it is not the first one below that heading; without blocks that
            are ``before``.
        line: The line of the page on which its code begins.
        language: The language behind the fence.
        code: Its code, behind the code that it continues.
        before: Whether it is what a reader has before any change.
    """

    name: str
    line: int
    language: str
    code: str
    before: bool = False


def examples_of(page: str, language: str = "python") -> list[Example]:
    """Return the blocks of a page in a language, such as those of ``frameworks/ray.md``."""
    found: list[Example] = []
    heading, above, start, opening = "", "", 0, ""
    lines = (DOCS / page).read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if opening:
            if line == opening:
                own, opening = "\n".join(lines[start - 1 : number - 1]) + "\n", ""
                if lines[start - 2].strip("` ") == language:
                    found.append(_example(found, heading, above, start, language, own))
        elif fence := re.match(r"(`{3,})\w*$", line):
            opening, start = fence[1], number + 1
        elif line.startswith("#"):
            heading = line.lstrip("# ")
        elif line:
            above = line
    return found


def _example(found: list[Example], heading: str, above: str, line: int, language: str, own: str) -> Example:
    before = above.endswith("Before:")
    others = [each for each in found if re.sub(r" \d+$", "", each.name) == heading and not each.before]
    name = heading if before or not others else f"{heading} {len(others) + 1}"
    if (mark := _MARK.match(above)) and mark[1] == "after":
        own = found[-1].code + own
    elif mark:
        own = in_loop_of(found[-1].code, own)
    return Example(name, line, language, own, before)


def in_loop_of(code: str, lines: str) -> str:
    """Return code that ends in the body of a loop, with more lines at the end of that body."""
    last = code.splitlines()[-1]
    return code + textwrap.indent(lines, last[: len(last) - len(last.lstrip())])
