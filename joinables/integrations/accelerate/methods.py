"""What an accelerator does in a block: :func:`scaling_losses`, and any other method in the place of its own."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from join import Join


@contextmanager
def replaced(target: Any, name: str, method: Callable[..., Any]) -> Generator[None]:
    """A context in which an object has another method."""
    around: Any = target.__dict__.get(name)  # of a context around this one
    setattr(target, name, method)
    try:
        yield
    finally:
        delattr(target, name)
        if around is not None:
            setattr(target, name, around)


def scaling_losses(accelerator: Any, join: Join) -> AbstractContextManager[None]:
    """A context in which ``accelerator.backward`` scales each loss by what its batch weighs in the block ``join``."""
    backward = accelerator.backward

    def scaled_backward(loss: Any, **named: Any) -> None:
        backward(join.scale(loss), **named)

    return replaced(accelerator, "backward", scaled_backward)
