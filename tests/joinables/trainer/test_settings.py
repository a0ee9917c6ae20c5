"""Workers that are not forked have the settings of the process that started them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from joinables.trainer import Launcher, settings


@pytest.fixture
def changed(server: None) -> Iterator[None]:
    """Settings that are all different from the defaults."""
    before = settings.capture()
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_deterministic_debug_mode("warn")
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.benchmark, torch.backends.mkldnn.deterministic = True, True
    yield
    torch.set_default_device(None)
    settings.restore(before)


def captured() -> dict[str, Any]:
    return settings.capture()


def test_workers_have_the_settings_of_the_caller(changed: None) -> None:
    here: dict[str, Any] = settings.capture()
    assert Launcher(2, start_method="forkserver").launch(captured) == here


def test_reading_a_setting_does_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch 2.9, where even the default of this setting is read with a warning."""

    def warns() -> str:
        warnings.warn("Please use the new API settings", stacklevel=2)
        return "highest"

    monkeypatch.setattr(torch, "get_float32_matmul_precision", warns)
    found: dict[str, Any] = settings.capture()
    assert found["float32_matmul_precision"] == "highest"
    settings.restore(found)
