"""A change of one line that makes the code wrong, and the test that fails then."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One mutant.

    Attributes:
        path: the file, from the root of the repository.
        old: a text that is exactly once in the file.
        new: the text in its place.
        killed_by: the test that fails with the mutant, as pytest names it.
    """

    path: str
    old: str
    new: str
    killed_by: str

    def applied(self, text: str) -> str:
        """The text of the file with the mutant in it; "" if the old text is not in it exactly once."""
        return text.replace(self.old, self.new) if text.count(self.old) == 1 else ""
