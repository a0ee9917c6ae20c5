"""``python -m joinables doctor``: says what is here, what ranks will use, and what to do about it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from join.collectives.shared_memory.segment import SWITCH, obstacle, obstacle_found
from joinables.commands.findings import Finding
from joinables.commands.network import look_at_network
from joinables.commands.versions import look_at_backends, look_at_versions


def add_to(commands: Any) -> None:
    """Add the command to those of a parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="look at this machine: versions, backends, shared memory, network",
        description=(
            "Says which versions are here and whether they were tried, what carries collectives and headers, and which"
            " interfaces and ports ranks will use; and what to do about each. The exit status is 1 if there is"
            " something to do, else 0."
        ),
    )
    parser.add_argument("--run", action="store_true", help="also train on two ranks, and compare with one process")
    parser.set_defaults(act=_run)


def _run(options: argparse.Namespace) -> int:
    looks: dict[str, Callable[[], list[Finding]]] = {
        "versions": look_at_versions,
        "backends": look_at_backends,
        "headers": look_at_headers,
        "network": look_at_network,
    }
    if options.run:
        from joinables.commands.two_ranks import look_at_training

        looks["training"] = look_at_training
    to_do = 0
    for name, look in looks.items():
        print(name)
        for finding in look():
            print(finding, flush=True)
            to_do += finding.kind == "to do"
    print(f"{to_do} to do" if to_do else "nothing to do")
    return int(to_do > 0)


def look_at_headers() -> list[Finding]:
    """Whether headers go through shared memory between ranks of this machine."""
    why = obstacle_found(2)
    if not why:
        return [Finding("through shared memory, between ranks of one machine; else over the process group")]
    told = f"over the process group, as a small message at each step: {why}"
    if SWITCH in why:
        return [Finding(told, "to do", f"unset {SWITCH}")]
    if obstacle():  # of the machine
        return [Finding(told, "note")]
    return [Finding(told, "to do", f"let processes use memfd_create and /proc, or set {SWITCH}=0 and leave it so")]
