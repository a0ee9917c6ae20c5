"""Workers that are not forked have the settings of the process that started them."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from joinables.trainer import Launcher, settings


class OwnWarning(UserWarning):
    """A class of warnings that workers can import."""


@pytest.fixture
def changed(server: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Settings that are all different from the defaults, and another handler and filter."""
    before = settings.capture()
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_deterministic_debug_mode("warn")
    torch.set_float32_matmul_precision("medium")
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    torch.multiprocessing.set_sharing_strategy("file_system")
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cudnn.benchmark, torch.backends.mkldnn.deterministic = True, True
    torch.set_warn_always(True)
    logging.getLogger("joinables.settings").setLevel(logging.ERROR)
    monkeypatch.setattr(logging.root, "handlers", [logging.StreamHandler(sys.stdout)])
    warnings.filterwarnings("ignore", "text", OwnWarning)
    yield
    torch.set_default_device(None)
    with warnings.catch_warnings():
        settings.restore(before)
    logging.getLogger("joinables.settings").setLevel(logging.NOTSET)


def captured() -> dict[str, Any]:
    return settings.capture()


def test_workers_have_the_settings_of_the_caller(changed: None) -> None:
    here: dict[str, Any] = settings.capture()
    there = Launcher(2, start_method="forkserver").launch(captured)
    assert (there["torch"], there["handlers"]) == (here["torch"], here["handlers"])
    assert there["levels"].items() >= here["levels"].items()
    assert here["filters"][0] in there["filters"]
