"""What a block has, looked for in the package: :class:`Package`.

``with join.Join([model, optimizer]):`` without ``as join`` leaves ``join`` the package. ``join.weight = 3`` would be an
attribute of a module then, which nobody reads.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from typing_extensions import override

_OF_A_BLOCK = {"is_last_step", "iterate", "pending", "shadowing", "weight"}


class Package(ModuleType):
    """A package in which names of a block are errors that say where they are."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_hint(self, name) or f"module {self.__name__!r} has no attribute {name!r}")

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if hint := _hint(self, name):
            raise AttributeError(hint)
        super().__setattr__(name, value)


def _hint(package: ModuleType, name: str) -> str | None:
    if name not in _OF_A_BLOCK:
        return None
    return (
        f"{name!r} is of a block, and {package.__name__!r} is the package here; name the block:"
        f" `with {package.__name__}.Join([...]) as block:`, and use block.{name} [J021]"
    )
