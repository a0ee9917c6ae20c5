"""Two hosts on one kernel, with a link between them that can be cut: :class:`Hosts`.

A host is a network namespace. All processes of a kernel share memory, whatever their network, so a host may be given
processes of its own besides (a pid namespace): what is outside it cannot be seen there, as on another machine.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

HOSTS = 2
LINK = "link0"
PORT = 29500  # in a network namespace that was just made, every port is free
_ROOT = Path(__file__).parent.parent.parent


class NoHosts(Exception):
    """Hosts cannot be made here; the text says why."""


def _ip(*words: str) -> str:
    """What ``ip`` prints.

    Raises:
        RuntimeError: with what it says on stderr.
    """
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


class Hosts:
    """Two hosts, and the processes on them.

    Args:
        private: for each host, whether its processes can be seen there only.
        ipv6: whether they have addresses of IPv6 only, instead of IPv4.

    Raises:
        NoHosts: if there is no ``ip``, or it may not make any.
    """

    def __init__(self, private: tuple[bool, bool], *, ipv6: bool = False) -> None:
        self._private, self._ipv6 = private, ipv6
        token = secrets.token_hex(4)
        self._names = [f"join-{token}-{host}" for host in range(HOSTS)]
        self._started: list[subprocess.Popen[bytes]] = []
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        if shutil.which("ip") is None:
            raise NoHosts("ip (iproute2) is not installed")
        try:
            for name in self._names:
                _ip("netns", "add", name)
            here, there = self._names
            _ip("link", "add", LINK, "netns", here, "type", "veth", "peer", "name", LINK, "netns", there)
        except RuntimeError as error:
            raise NoHosts(f"network namespaces cannot be made here: {error}") from None
        if any(self._private) and not _can_unshare():
            raise NoHosts("pid namespaces cannot be made here")
        for host, name in enumerate(self._names):
            nodad = ["nodad"] if self._ipv6 else []
            _ip("-n", name, "addr", "add", f"{address(host, ipv6=self._ipv6)}/24", "dev", LINK, *nodad)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", LINK, "up")

    def cut(self) -> None:
        """Cut the link."""
        _ip("-n", self._names[-1], "link", "set", LINK, "down")

    def answer_nowhere(self, name: str) -> None:
        """Let packets to an address go into the link, where nobody has it."""
        for host in self._names:
            _ip("-n", host, "neigh", "add", name, "lladdr", "02:00:00:00:00:77", "dev", LINK)

    def run(self, module: str, *arguments: str, told: Path, limit: float = 60.0) -> list[str]:
        """Run a module on each host, with the number of the host; what it writes, by host."""
        files = [told.with_name(f"{told.name}-{host}") for host in range(HOSTS)]
        for host, file in enumerate(files):
            self._start(host, [sys.executable, "-m", module, str(host), *arguments], file)
        for started in self._started:
            started.wait(limit)
        return [file.read_text() for file in files]

    def torchrun(self, processes: int, module: str, *arguments: str, told: Path) -> None:
        """Start so many processes on each host, by an agent there; what they write goes to files of that name."""
        for host in range(HOSTS):
            agent = [sys.executable, "-m", "tests.torchrun", "--nnodes", str(HOSTS)]
            agent += ["--nproc-per-node", str(processes), "--rdzv-backend", "c10d", "--rdzv-id", "two-hosts"]
            agent += ["--rdzv-endpoint", f"{address(0)}:{PORT}", "--local-addr", address(host)]
            agent += ["--rdzv-conf", f"is_host={int(host == 0)}"]  # else they tell by names, and both have one
            self._start(host, [*agent, "-m", module, *arguments], told.with_name(f"{told.name}-{host}"))

    def _start(self, host: int, command: list[str], told: Path) -> None:
        apart = ["unshare", "--pid", "--fork", "--mount-proc"] if self._private[host] else []
        with told.open("wb") as file:
            started = subprocess.Popen(
                ["ip", "netns", "exec", self._names[host], *apart, *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=_ROOT,
                env={**os.environ, "GLOO_SOCKET_IFNAME": LINK, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)},
                start_new_session=True,
            )
        self._started.append(started)

    def ended(self) -> list[int]:
        """The exit codes of the agents that have ended."""
        return [code for each in self._started if (code := each.poll()) is not None]

    def _pids(self) -> list[int]:
        """All processes on the hosts, whoever has started them."""
        found: list[int] = []
        for name in self._names:
            with suppress(RuntimeError):  # it was not made
                found += map(int, _ip("netns", "pids", name).split())
        return found

    def close(self) -> None:
        """End everything on the hosts, and remove them."""
        if shutil.which("ip") is None:
            return
        deadline = time.monotonic() + 10
        while (pids := self._pids()) and time.monotonic() < deadline:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        for name in self._names:
            with suppress(RuntimeError):  # it was not made
                _ip("netns", "del", name)  # and with it, its end of the link
        for each in self._started:
            each.wait(timeout=10)


def address(host: int, *, ipv6: bool = False) -> str:
    """Where a host is reached."""
    return f"fd77::{host + 1}" if ipv6 else f"10.77.0.{host + 1}"


def _can_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, timeout=20)
    return tried.returncode == 0
