"""Ranks on two hosts connect by the addresses that reach them, of either family, and never by a loopback address."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from tests.two_hosts.connecting import NOWHERE
from tests.two_hosts.hosts import Hosts, NoHosts, address


def run(case: str, path: Path) -> list[str]:
    try:
        hosts = Hosts((False, True), ipv6=case == "ipv6")
    except NoHosts as error:
        pytest.skip(str(error))
    with closing(hosts):
        if case == "drops":
            hosts.answer_nowhere(NOWHERE[0])
        return hosts.run("tests.two_hosts.connecting", case, told=path / "rank")


def said(text: str) -> list[object]:
    (line,) = [line for line in text.splitlines() if line.startswith("SAID ")] or [text]
    return json.loads(line.removeprefix("SAID "))


@pytest.mark.parametrize("case", ["ipv6", "route"])
def test_ranks_connect_by_the_addresses_of_their_hosts(tmp_path: Path, case: str) -> None:
    for rank, text in enumerate(run(case, tmp_path)):
        assert said(text) == ["MessageLine", 2, [address(1 - rank, ipv6=case == "ipv6")]], text


def test_a_firewall_that_drops_is_named_once(tmp_path: Path) -> None:
    texts = run("drops", tmp_path)
    assert [said(text) for text in texts] == [["GroupLine", 2, [NOWHERE[0]]]] * 2, texts
    warnings = [line for text in texts for line in text.splitlines() if "all-reduces of the process group" in line]
    assert len(warnings) == 1 and f"rank 1 at {NOWHERE[0]} port {NOWHERE[1]} did not connect within 1 s" in warnings[0]


def test_a_link_that_is_cut_while_ranks_connect(tmp_path: Path) -> None:
    texts = [str(said(text)) for text in run("cut", tmp_path)]
    assert all(text.startswith(("JoinTimeoutError: ", "PeerError: ")) for text in texts), texts
