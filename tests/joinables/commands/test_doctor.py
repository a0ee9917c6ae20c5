"""``python -m joinables doctor``: what it finds, and its exit status."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import joinables
from join.collectives.shared_memory import segment
from joinables.__main__ import main
from joinables.commands import doctor, network, two_ranks, versions
from joinables.commands.findings import Finding
from joinables.commands.two_ranks import STEPS, Told, judged

ROOT = Path(joinables.__file__).parent.parent


def test_all_of_it_where_shared_memory_is_forbidden() -> None:
    environment = {**os.environ, "JOIN_SHARED_MEMORY": "0", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    command = [sys.executable, "-W", "error", "-m", "joinables", "doctor", "--run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, env=environment)
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        "versions", "backends", "headers", "network", "training", "1 to do",
    ]  # fmt: skip
    headers = lines.index("headers")
    why = "over the process group, as a small message at each step: JOIN_SHARED_MEMORY=0 forbids it"
    assert lines[headers + 1 : headers + 3] == [f"  to do  {why}", "         -> unset JOIN_SHARED_MEMORY"]
    assert f"  ok     torch {torch.__version__}" in done.stdout or f"  note   torch {torch.__version__}" in done.stdout
    assert "  ok     GLOO_SOCKET_IFNAME=lo: gloo will use 127.0.0.1" in lines
    difference = re.search(r"largest difference to one process (\S+),", done.stdout)
    assert difference is not None and float(difference[1]) < 1e-12
    assert "  ok     headers went over the process group" in lines


def test_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("look_at_versions", "look_at_backends", "look_at_headers", "look_at_network"):
        monkeypatch.setattr(doctor, name, lambda: [Finding("one"), Finding("other", "note", "look there")])
    monkeypatch.setattr(two_ranks, "look_at_training", lambda: [Finding("bad", "to do", "mend it")])
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert told.endswith("nothing to do\n") and "training" not in told
    assert "  ok     one\n  note   other\n         -> look there\n" in told
    assert main(["doctor", "--run"]) == 1
    assert capsys.readouterr().out.endswith("training\n  to do  bad\n         -> mend it\n1 to do\n")


# -- headers -----------------------------------------------------------------------------------------------------------


def no_memory(*args: Any) -> None:
    raise OSError("no space")


@pytest.mark.parametrize(
    ("fault", "kind", "told"),
    [
        (lambda patch: None, "ok", "through shared memory"),
        (lambda patch: patch.setenv(segment.SWITCH, "0"), "to do", "JOIN_SHARED_MEMORY=0 forbids it"),
        (lambda patch: patch.setattr(segment.platform, "machine", lambda: "aarch64"), "note", "aarch64 does not keep"),
        (lambda patch: patch.setattr(os, "posix_fallocate", no_memory), "to do", "no memory for it: no space"),
        (lambda patch: patch.delattr(os, "memfd_create"), "to do", "no memory for it: [Errno 38]"),
        (lambda patch: patch.setattr(os, "readlink", no_memory), "to do", "no memory for it: no space"),
        (lambda patch: patch.setattr(segment, "_opened", lambda made: None), "to do", "cannot open each other's files"),
    ],
)
def test_headers(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None], kind: str, told: str
) -> None:
    monkeypatch.delenv(segment.SWITCH, raising=False)
    before = len(os.listdir("/proc/self/fd"))
    fault(monkeypatch)
    (found,) = doctor.look_at_headers()
    monkeypatch.undo()
    assert found.kind == kind and told in found.text
    assert bool(found.advice) == (kind == "to do")
    assert len(os.listdir("/proc/self/fd")) == before


# -- versions ----------------------------------------------------------------------------------------------------------


def test_what_was_tried_is_what_is_pinned_and_written() -> None:
    pinned = dict(
        line.partition(";")[0].strip().split("==") for line in (ROOT / "constraints.txt").read_text().splitlines()
    )
    oldest, newest = joinables._torch.versions.SUPPORTED.split(" to ")
    assert (versions.TRIED["torch"][0], versions.TRIED["torch"][-1]) == (oldest, newest)
    for name, tried in versions.TRIED.items():
        assert name == "Python" or ".".join(map(str, versions.minor_of(pinned[name]))) in tried, name
    written = (ROOT / "docs" / "versions.md").read_text()
    assert all(re.search(rf"\| {re.escape(each)}\.", written) for each in versions.TRIED["torch"])
    assert all(re.search(rf"\b{re.escape(each)}\b", written) for each in versions.TRIED["Python"])


@pytest.mark.parametrize(
    ("name", "version", "kind"),
    [
        ("torch", "2.13.0+cpu", "ok"),
        ("torch", "2.9.1", "note"),
        ("torch", "2.7.1", "to do"),
        ("torch", "3.0.0a0+git12", "note"),
        ("Python", "3.11.7", "ok"),
        ("Python", "3.14.0", "note"),
        ("lightning", "2.6.6", "ok"),
        ("lightning", "2.7.0.dev1", "note"),
    ],
)
def test_versions(name: str, version: str, kind: str) -> None:
    found = versions.finding_of(name, version)
    assert found.kind == kind and found.text.startswith(f"{name} {version}")


def test_versions_and_backends_here() -> None:
    told = [found.text for found in versions.look_at_versions()]
    assert told[0] == f"joinables {joinables.__version__}"
    assert told[2].startswith(f"torch {torch.__version__}")
    assert versions.look_at_backends()[0] == Finding("gloo")


# -- network -----------------------------------------------------------------------------------------------------------


def named(monkeypatch: pytest.MonkeyPatch, address: str | None) -> None:
    """This machine's name stands for an address."""

    def look_up(name: str) -> str:
        if name == socket.gethostname() and address is None:
            raise socket.gaierror(-2, "Name or service not known")
        return {socket.gethostname(): str(address), "localhost": "127.0.0.1"}.get(name, "192.0.2.77")

    monkeypatch.setattr(socket, "gethostbyname", look_up)


@pytest.mark.parametrize(
    ("environment", "address", "kind", "told"),
    [
        ({"GLOO_SOCKET_IFNAME": "lo"}, None, "ok", "gloo will use 127.0.0.1"),
        ({"GLOO_SOCKET_IFNAME": "lo,no0"}, None, "to do", "there is no interface 'no0'"),
        ({}, None, "note", "has no address"),
        ({}, "127.0.1.1", "note", "127.0.1.1, which reaches this machine only"),
        ({"MASTER_ADDR": "node1"}, "127.0.1.1", "to do", "127.0.1.1, which reaches this machine only"),
        ({"MASTER_ADDR": "localhost"}, "127.0.1.1", "note", "127.0.1.1, which reaches this machine only"),
        ({}, "192.0.2.78", "note", "192.0.2.78, which is not this machine's"),
    ],
)
def test_interfaces(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], address: str | None, kind: str, told: str
) -> None:
    named(monkeypatch, address)
    interfaces, found, ports, *_ = network.look_at_network(environment)
    assert "lo 127.0.0.1" in interfaces.text
    assert found.kind == kind and told in found.text
    assert "gloo listens on free ports" in ports.text


def test_a_name_that_is_slow_to_find(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, "127.0.0.1")
    monkeypatch.setattr(network, "_SLOW", -1.0)
    assert "finding that took" in network.look_at_network({})[1].text


@pytest.mark.parametrize(
    ("environment", "kind", "told"),
    [
        ({}, "ok", "are not set"),
        ({"MASTER_ADDR": "node1"}, "to do", "MASTER_ADDR is set, and MASTER_PORT is not"),
        ({"MASTER_PORT": "29500"}, "to do", "MASTER_PORT is set, and MASTER_ADDR is not"),
        ({"MASTER_ADDR": "node1", "MASTER_PORT": "99999"}, "to do", "MASTER_PORT=99999 is no port"),
        ({"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}, "ok", "ranks meet at MASTER_ADDR=node1 (192.0.2.77)"),
    ],
)
def test_where_ranks_meet(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], kind: str, told: str) -> None:
    named(monkeypatch, "127.0.0.1")
    found = network.look_at_network(environment)[-1]
    assert found.kind == kind and told in found.text


def test_a_port_that_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, "127.0.0.1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        environment = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(taken.getsockname()[1])}
        assert "the port is in use" in network.look_at_network(environment)[-1].text
        assert network.look_at_network({**environment, "TORCHELASTIC_RUN_ID": "1"})[-1].kind == "ok"
    assert network.look_at_network(environment)[-1].kind == "ok"


def test_master_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(name: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", look_up)
    found = network.look_at_network({"MASTER_ADDR": "node1", "MASTER_PORT": "29500"})[-1]
    assert found.kind == "to do" and "MASTER_ADDR=node1 has no address" in found.text


# -- training ----------------------------------------------------------------------------------------------------------


def test_what_two_ranks_tell() -> None:
    alone = two_ranks._alone().tolist()
    good = Told(alone, 0.24, shares_memory=True)
    found = judged({0: good, 1: good}, 5)
    assert [each.kind for each in found] == ["ok", "ok"]
    assert found[0].text.endswith(f"difference to one process 0.0e+00, {1e3 * 0.24 / max(STEPS):.2f} ms a step")
    assert found[1].text == "headers went through shared memory"
    (found, _) = judged({0: good, 1: Told([alone[0] + 1e-6, *alone[1:]], 0.24)}, 5)
    assert found.kind == "to do" and "1.0e-06" in found.text
    (found,) = judged({0: good}, 5)
    assert found.kind == "to do" and found.text == "rank 1 did not come back within 5 s"
    (found,) = judged({0: Told(error="RuntimeError: no"), 1: good}, 5)
    assert found.kind == "to do" and found.text == "two ranks could not train: rank 0: RuntimeError: no"


def test_findings_are_read_by_people_only() -> None:
    assert json.dumps(str(Finding("a", "to do", "b"))) == json.dumps("  to do  a\n         -> b")
