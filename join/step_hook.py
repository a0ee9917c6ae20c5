"""Hooks of all optimizers that blocks register and remove: :class:`StepHook`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from threading import RLock
from types import SimpleNamespace
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class StepHook:
    """A hook of all optimizers, which stays registered: it calls functions that come and go.

    Torch goes through its own hooks of all optimizers while it calls them. To add or remove one then, in another thread
    or in a hook, ends the step with an error. Here, the functions are replaced as a whole, and a step calls those that
    it has found. The hook is registered with the first function of the process. Hooks that a user adds later run after
    it.

    Without functions, it calls one of the interpreter that does nothing: after the arithmetic of a step, a call of a
    Python function takes 1 us.

    Args:
        register: One of torch's functions that register a hook of all optimizers.
    """

    def __init__(self, register: Callable[[Callable[..., None]], object]) -> None:
        self._register: Callable[[Callable[..., None]], object] | None = register
        self._hook: Any = partial(_ignore)  # its function can be replaced
        self.functions: tuple[Callable[..., None], ...] = ()
        """What a step calls now."""
        self._lock = RLock()

    def add(self, function: Callable[..., None]) -> Any:
        """Call a function once in each step of any optimizer, as torch's hook would; return a handle of it."""
        with self._lock:
            register, self._register = self._register, None
            if register is not None:
                register(self._hook)
            self._replace((*(each for each in self.functions if each != function), function))
        return SimpleNamespace(remove=partial(self.remove, function))

    def remove(self, function: Callable[..., None]) -> None:
        """Call a function no more."""
        with self._lock:
            self._replace(tuple(each for each in self.functions if each != function))

    def _replace(self, functions: tuple[Callable[..., None], ...]) -> None:
        self.functions = functions
        self._hook.__setstate__((self._call if functions else _ignore, (), {}, None))

    def _call(self, *args: Any) -> None:
        for function in self.functions:
            if function in self.functions:  # or another thread has removed it meanwhile
                function(*args)


_ignore: Callable[..., None] = partial(sys.audit, "join.step_hook")
before_step = StepHook(register_optimizer_step_pre_hook)
after_step = StepHook(register_optimizer_step_post_hook)
