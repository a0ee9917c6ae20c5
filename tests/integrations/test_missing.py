"""Without a framework: a sentence that says what to install. This runs everywhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module

import pytest


def use_lightning() -> None:
    import_module("joinables.integrations.lightning")


def use_accelerate() -> None:
    import_module("joinables.integrations.accelerate").join_uneven_inputs("no accelerator", [])


def use_transformers() -> None:
    import_module("joinables.integrations.transformers")


@pytest.mark.parametrize("use", [use_lightning, use_accelerate, use_transformers])
def test_a_missing_extra_is_a_sentence(monkeypatch: pytest.MonkeyPatch, use: Callable[[], None]) -> None:
    name = use.__name__.removeprefix("use_")
    ours = f"joinables.integrations.{name}"
    for module in [each for each in sys.modules if each == ours or each.startswith(f"{ours}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises((ImportError, TypeError), match=rf"pip install 'joinables\[{name}\]'"):
        use()
