"""``python -m joinables check``: what it says, and its exit status."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import joinables
from join.collectives import shared_memory
from joinables import check
from joinables._torch.versions import SUPPORTED
from joinables.testing import assert_equals_one_process
from tests.ending import Ending
from tests.harness import NIGHT

ROOT = Path(joinables.__file__).parent.parent


def run(**environment: str) -> tuple[int, str, str]:
    """The exit status, the output and the errors of the command."""
    kept = {name: value for name, value in os.environ.items() if name not in ("MASTER_ADDR", "GLOO_SOCKET_IFNAME")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "joinables", "check"],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env={**kept, "PYTHONPATH": str(ROOT), **environment},
    )
    return done.returncode, done.stdout, done.stderr


def test_a_machine_on_which_all_is_well(ending: Ending) -> None:
    well = {"GLOO_SOCKET_IFNAME": "lo", "JOIN_SHARED_MEMORY": "1"}
    if NIGHT:
        status, output, errors = run(**well)
    else:
        (end,) = ending.ends(functools.partial(forked, **well), ranks=1, group=False)
        status, output, errors = end.result, end.text, end.stderr
    assert status == 0
    assert errors == "       (training two ranks and a single process: seconds, or a minute on a busy machine)\n"
    assert f"torch {torch.__version__} (tested: {SUPPORTED})\n" in output
    assert "ok     headers travel through shared memory" in output
    assert "ok     gloo takes the address of lo, as GLOO_SOCKET_IFNAME says\n" in output
    assert re.search(r"^ok     two ranks .* no difference above 1e-12$", output, re.MULTILINE)


def forked(rank: int, **environment: str) -> int:
    """The exit status of the command, whose ranks need not import torch."""
    os.environ.pop("MASTER_ADDR", None)
    os.environ.update(environment)
    check.assert_equals_one_process = functools.partial(assert_equals_one_process, start_method="fork")
    return check.check()


def test_an_interface_that_is_not_there(ending: Ending) -> None:
    command = functools.partial(forked, GLOO_SOCKET_IFNAME="lo,no0", JOIN_SHARED_MEMORY="0")
    (end,) = ending.ends(command, ranks=1, group=False)
    assert end.result == 1
    assert "note   headers travel over gloo" in end.text
    assert "JOIN_SHARED_MEMORY=0 forbids it\n" in end.text
    wrong = r"^WRONG  GLOO_SOCKET_IFNAME=lo,no0 names the interface 'no0', which is missing. Set it to"
    assert re.search(wrong, end.text, re.MULTILINE)


@pytest.mark.parametrize(
    ("limit", "tolerance", "told"), [(0.01, 1.0, "did not return in time"), (90.0, 0.0, "difference")]
)
def test_training_goes_wrong(
    server: None, monkeypatch: pytest.MonkeyPatch, limit: float, tolerance: float, told: str
) -> None:
    monkeypatch.setattr(check, "_TOLERANCE", tolerance)
    served = functools.partial(assert_equals_one_process, start_method="forkserver")
    monkeypatch.setattr(check, "assert_equals_one_process", served)
    (found,) = check.look_at_training(limit)
    assert found.kind == "WRONG" and told in found.text


@pytest.mark.parametrize(
    ("master", "address", "kind", "told"),
    [
        ("", "192.0.2.78", "ok", "gloo takes 192.0.2.78, the address of this host's name"),
        ("localhost", "127.0.1.1", "note", "127.0.1.1, the address of this host's name"),
        ("node1", "127.0.1.1", "WRONG", "which only this machine reaches. If ranks run on other machines"),
        ("node1", "", "WRONG", "gloo takes 127.0.0.1, since"),
    ],
)
def test_gloo(monkeypatch: pytest.MonkeyPatch, master: str, address: str, kind: str, told: str) -> None:
    monkeypatch.setattr(check, "_address_of", lambda name: address)
    (found,) = check.look_at_gloo({"MASTER_ADDR": master})
    assert found.kind == kind and told in found.text


def test_an_address_is_one_that_this_machine_can_listen_on() -> None:
    assert check._address_of("127.0.0.1") == "127.0.0.1"
    assert check._address_of("192.0.2.78") == ""
    assert check._address_of("no.such.host.invalid") == ""


def no_memory(*_: object) -> None:
    raise OSError("no space")


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (lambda patch: patch.setattr(shared_memory.platform, "machine", lambda: "aarch64"), "aarch64 does not ensure"),
        (lambda patch: patch.setattr(os, "posix_fallocate", no_memory), "no memory for it: no space"),
        (lambda patch: patch.setattr(shared_memory, "_open", lambda made: None), "cannot open each other's files"),
    ],
)
def test_no_shared_memory(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None], why: str
) -> None:
    monkeypatch.delenv(shared_memory.SWITCH, raising=False)
    before = len(os.listdir("/proc/self/fd"))
    fault(monkeypatch)
    (found,) = check.look_at_headers()
    monkeypatch.undo()
    assert found.kind == "note" and why in found.text
    assert len(os.listdir("/proc/self/fd")) == before


def test_tested_versions_are_those_of_the_page() -> None:
    page = (ROOT / "docs" / "support.md").read_text()
    assert all(f"| {version}." in page or f", {version}." in page for version in SUPPORTED.split(" to "))
