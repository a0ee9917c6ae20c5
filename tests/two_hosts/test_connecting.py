"""Ranks on two hosts connect for headers in their first block, or say why they cannot."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from tests.two_hosts.hosts import Hosts, NoHosts

SECONDS = 30.0


def run(case: str, path: Path) -> list[str]:
    """How entering a block has ended on each host."""
    try:
        hosts = Hosts((False, True), ipv6=case == "ipv6")
    except NoHosts as error:
        pytest.skip(str(error))
    with closing(hosts):
        outputs = hosts.run("tests.two_hosts.connecting", case, told=path / "rank")
    found = [[line for line in output.splitlines() if line.startswith("SAID ")] for output in outputs]
    assert all(found), outputs
    texts, seconds = zip(*(json.loads(line.removeprefix("SAID ")) for (line,) in found), strict=True)
    assert max(seconds) < SECONDS, texts
    return list(texts)


def test_ipv6(tmp_path: Path) -> None:
    assert run("ipv6", tmp_path) == ["1 steps on a GroupLine"] * 2


@pytest.mark.parametrize("case", ["loopback", "loopback, timeout 9"])
def test_names_with_a_loopback_address(tmp_path: Path, case: str) -> None:
    """A group without a CPU backend, such as NCCL, connects over gloo only here."""
    texts = run(case, tmp_path)
    assert all("Set GLOO_SOCKET_IFNAME on each machine" in text for text in texts), texts
    assert sorted(text.partition(": ")[0] for text in texts) == ["JoinError", "PeerError"], texts


def test_a_link_that_is_cut_while_ranks_connect(tmp_path: Path) -> None:
    texts = run("cut, timeout 3", tmp_path)
    assert all(text.startswith(("JoinTimeoutError: ", "PeerError: ")) for text in texts), texts
