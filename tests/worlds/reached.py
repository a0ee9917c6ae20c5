"""What small programs reach: :class:`Reached` records the states of objects, and the kinds of messages.

A state is a member of an enumeration, or a truth value, that an object of the protocol has as an attribute. A kind of
message is a place in the code that sends one.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections import defaultdict
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Any

import join
from join.rounds import Options

SENDS = {
    *(
        "start",
        "sum",
        "sum_float",
        "gather",
        "gather_numbers",
        "all_reduce",
        "broadcast",
    ),
    *("all_gather", "all_gather_object", "broadcast_object", "barrier", "reduce_boolean_decision"),
}
"""The methods of ``Collective``, ``Line`` and ``Messages`` that send something."""
_OTHERS = tuple(f"join.{name}" for name in ("collectives", "report", "failure.w", "scaling", "mean", "errors"))
# which carry messages, watch and explain in another thread, or are called by the body of a loop


class Reached:
    """States and messages of the threads of a scheduler, while this is its ``trace``."""

    def __init__(self) -> None:
        found = pkgutil.walk_packages(join.__path__, "join.")
        modules = [importlib.import_module(name) for _, name, _ in found if not name.startswith(_OTHERS)]
        self._places = {(str(m.__file__), line): name for m in modules for line, name in _sends(Path(str(m.__file__)))}
        self._files = {str(module.__file__) for module in modules}
        self._names = {module.__name__ for module in modules}
        self._values = defaultdict[tuple[str, str], set[Any]](set)
        self._sent = set[tuple[str, int]]()
        kinds = [each for module in modules for each in vars(module).values() if inspect.isclass(each)]
        self._members = {member for kind in kinds if issubclass(kind, Enum) for member in kind}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Trace a call, as ``sys.settrace`` asks for it."""
        return self._in if frame.f_code.co_filename in self._files else None

    def _in(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self._sent.add((frame.f_code.co_filename, frame.f_lineno))
        owner = frame.f_locals.get("self")
        for each in (owner, getattr(owner, "place", None)):
            attributes: dict[str, Any] = getattr(each, "__dict__", {})
            is_state = type(each).__module__ in self._names and not isinstance(each, Options)
            for name, value in attributes.items() if is_state else ():
                if isinstance(value, (bool, Enum)):
                    self._values[type(each).__name__, name].add(value)
        return self._in

    def missing(self) -> set[str]:
        """Return the states and messages that were not reached."""
        seen = set[Any]().union(*self._values.values())
        states = {f"{type(member).__name__}.{member.name}" for member in self._members - seen}
        for (kind, name), values in self._values.items():
            states |= {f"{kind}.{name} is {value}" for value in {True, False} - values if values <= {True, False}}
        return states | {name for place, name in self._places.items() if place not in self._sent}


def _sends(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line of each call in a file that sends something, and its name: the function, and the method."""
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef):
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in SENDS:
                    yield call.lineno, f"{path.stem}.{function.name} sends {call.func.attr}"
