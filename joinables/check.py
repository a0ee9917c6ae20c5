"""Check of this machine: ``python -m joinables check`` shows how ranks communicate, and whether they train exactly.

It trains on two ranks of this machine; the second has a third of the first one's batches. They are compared with a
single process. Each line of the output is ``ok``, a ``note``, or ``WRONG``.
"""

from __future__ import annotations

import ipaddress
import os
import platform
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import joinables
from join import Join
from join.collectives.shared_memory import obstacle_found
from joinables._torch.versions import SUPPORTED
from joinables.testing import NotExact, RankFailed, assert_equals_one_process

INTERFACE = "GLOO_SOCKET_IFNAME"
BATCHES = (12, 4)
"""The number of batches of each rank."""
_LIMIT = 90.0  # seconds for each run; ranks need most of them to import torch
_TOLERANCE = 1e-12  # for doubles that were summed in different orders


class Finding(NamedTuple):
    """Line of the output."""

    kind: Literal["ok", "note", "WRONG"]
    text: str


def check() -> int:
    """Print all findings and return the exit status, which is 1 if something is wrong."""
    wrong = 0
    for look in (look_at_versions, look_at_headers, look_at_gloo, look_at_training):
        for finding in look():
            print(f"{finding.kind:<6} {finding.text}", flush=True)
            wrong += finding.kind == "WRONG"
    return int(wrong > 0)


def look_at_versions() -> Iterator[Finding]:
    """Report the installed versions, and the tested versions of torch."""
    yield Finding("ok", f"joinables {joinables.__version__}, Python {platform.python_version()}")
    oldest, newest = (_minor_of(version) for version in SUPPORTED.split(" to "))
    is_tested = oldest <= _minor_of(torch.__version__) <= newest
    yield Finding("ok" if is_tested else "note", f"torch {torch.__version__} (tested: {SUPPORTED})")


def _minor_of(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.partition("+")[0].split(".")[:2])


def look_at_headers() -> Iterator[Finding]:
    """Report how headers travel on this machine, and why."""
    if obstacle := obstacle_found():
        yield Finding("note", f"headers travel over gloo, not through shared memory, which is faster: {obstacle}")
    else:
        yield Finding("ok", "headers travel through shared memory; between machines, over gloo")


def look_at_gloo(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Report the address that gloo uses: the named interface's, or the host name's, or the loopback address."""
    if names := environment.get(INTERFACE, ""):
        known = [name for _, name in socket.if_nameindex()]
        if missing := [name for name in names.split(",") if name not in known]:
            fix = f"Set it to one of {', '.join(known)}, or unset it."
            yield Finding("WRONG", f"{INTERFACE}={names} names the interface {missing[0]!r}, which is missing. {fix}")
        else:
            yield Finding("ok", f"gloo takes the address of {names}, as {INTERFACE} says")
        return
    name = socket.gethostname()
    address = _address_of(name)
    if address and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        yield Finding("ok", f"gloo takes {address}, the address of this host's name {name!r}")
        return
    master = environment.get("MASTER_ADDR", "localhost")
    is_alone = master in ("", "localhost", "0.0.0.0", "::1") or master.startswith("127.")
    reason = (
        f"the address of this host's name {name!r}" if address else f"since {name!r} has no address of this machine"
    )
    fix = f"If ranks run on other machines too, set {INTERFACE} to the interface that reaches them."
    yield Finding(
        "note" if is_alone else "WRONG",
        f"gloo takes {address or '127.0.0.1'}, {reason}, which only this machine reaches. {fix}",
    )


def _address_of(name: str) -> str:
    """Return the first address of a host's name that this machine can listen on; empty if there is none."""
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as listener:
                listener.bind(address)
                return str(address[0])
    return ""


# -- training ---------------------------------------------------------------------------------------------------------


def look_at_training(limit: float = _LIMIT) -> Iterator[Finding]:
    """Train on two uneven ranks, for at most ``limit`` seconds, and compare with a single process."""
    if not dist.is_gloo_available():
        yield Finding("WRONG", "This torch has no gloo, which carries headers on CPU. Install a torch with gloo.")
        return
    draws = torch.Generator(device="cpu").manual_seed(0)
    batches = list(torch.randn(sum(BATCHES), 8, 16, dtype=torch.float64, generator=draws, device="cpu"))
    print("       (training two ranks and a single process: seconds, or a minute on a busy machine)", file=sys.stderr)
    two = f"two ranks with {BATCHES[0]} and {BATCHES[1]} batches"
    try:
        assert_equals_one_process(_train, batches, [BATCHES], tolerance=_TOLERANCE, timeout=limit)
    except NotExact as error:
        yield Finding("WRONG", f"{two} do not end as one process does: {' '.join(str(error).split())}")
    except RankFailed as error:
        fix = f"Set {INTERFACE}=lo and check again. If that helps, the address above cannot be reached."
        yield Finding("WRONG", f"{two} could not train: {str(error).splitlines()[0]} {fix}")
    else:
        yield Finding("ok", f"{two} end as one process does: no difference above {_TOLERANCE:g}")


def _train(loader: list[torch.Tensor], rank: int, world_size: int) -> Any:
    """Train on a rank, and return the parameters and the state of the optimizer."""
    layers = torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)
    model = DistributedDataParallel(torch.nn.Sequential(*layers).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with Join([model, optimizer], divide_by_initial_world_size=False):
        for batch in loader:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    return model.module.state_dict(), optimizer.state_dict()
