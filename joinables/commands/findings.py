"""What ``doctor`` finds: :class:`Finding`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        text: what was found.
        kind: ``"ok"``; ``"note"``, where it is well to know; ``"to do"``, where something will go wrong, or is slow.
        advice: what to do about it, if anything.
    """

    text: str
    kind: Literal["ok", "note", "to do"] = "ok"
    advice: str = ""

    def __str__(self) -> str:
        lines = [f"  {self.kind:<5}  {self.text}"]
        if self.advice:
            lines.append(f"         -> {self.advice}")
        return "\n".join(lines)
