"""Over which interfaces and ports ranks will talk: :func:`look_at_network`.

Gloo takes the interface that ``GLOO_SOCKET_IFNAME`` names, else the address that the machine's own name stands for,
else the loopback. Ranks meet at ``MASTER_ADDR`` and ``MASTER_PORT``, where a launcher has set these.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from joinables.commands.findings import Finding

INTERFACE = "GLOO_SOCKET_IFNAME"
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR, see netdevice(7)
_SLOW = 2.0  # seconds


def look_at_network(environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """Look at what gloo will listen on, and where ranks meet."""
    there = interfaces()
    found = [Finding("interfaces: " + ", ".join(f"{name} {address}" for name, address in there.items()))]
    chosen = environment.get(INTERFACE, "")
    found.append(_chosen(chosen, there) if chosen else _by_name(environment))
    found.append(Finding(f"gloo listens on free ports{_port_range()}; between machines, a firewall must let them pass"))
    return found + _master(environment)


def interfaces() -> dict[str, str]:
    """The IPv4 address of each interface, by its name; those without one say so."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        for _, name in socket.if_nameindex():
            try:
                told = fcntl.ioctl(one.fileno(), _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(told[20:24])
            except OSError:
                found[name] = "(no IPv4 address)"
    return found


def _chosen(names: str, there: Mapping[str, str]) -> Finding:
    missing = [name for name in names.split(",") if name not in there]
    if missing:
        return Finding(
            f"{INTERFACE}={names}, and there is no interface {missing[0]!r}: init_process_group will fail",
            "to do",
            f"set it to one of {', '.join(there)}, or unset it",
        )
    return Finding(f"{INTERFACE}={names}: gloo will use {', '.join(there[name] for name in names.split(','))}")


def _by_name(environment: Mapping[str, str]) -> Finding:
    name, started = socket.gethostname(), time.monotonic()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        told = f"{INTERFACE} is not set, and this machine's name {name!r} has no address ({error}): gloo takes loopback"
    else:
        told = f"{INTERFACE} is not set: gloo takes the address of this machine's name {name!r}, {address}"
        if (took := time.monotonic() - started) > _SLOW:
            advice = f"write {address} and {name} into /etc/hosts"
            return Finding(f"{told}; finding that took {took:.0f} s, at each start", "to do", advice)
        if not _can_listen(address, 0):
            told = f"{told}, which is not this machine's, and so loopback"
        elif not ipaddress.ip_address(address).is_loopback:
            return Finding(told)
    master = environment.get("MASTER_ADDR", "")
    # Another machine, or this one under an address that others reach.
    crosses = master not in ("", "localhost", "0.0.0.0") and not master.startswith("127.")
    advice = f"between machines, set {INTERFACE} to the interface that reaches the other machines"
    return Finding(f"{told}, which reaches this machine only", "to do" if crosses else "note", advice)


def _port_range() -> str:
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except (OSError, ValueError):
        return ""
    return f" between {low} and {high}"


def _master(environment: Mapping[str, str]) -> list[Finding]:
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if not host and not port:
        return [Finding("MASTER_ADDR and MASTER_PORT are not set: a launcher does that, such as torchrun or Trainer")]
    if not host or not port:
        there, missing = ("MASTER_ADDR", "MASTER_PORT") if host else ("MASTER_PORT", "MASTER_ADDR")
        return [Finding(f"{there} is set, and {missing} is not", "to do", "set both, or have torchrun start the ranks")]
    if not (port.isdigit() and 0 < int(port) < 65536):
        return [
            Finding(f"MASTER_PORT={port} is no port", "to do", "set it to a number from 1024 to 65535 that is free")
        ]
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        return [Finding(f"MASTER_ADDR={host} has no address ({error})", "to do", "set it to the address of rank 0")]
    where = f"ranks meet at MASTER_ADDR={host} ({address}), MASTER_PORT={port}"
    is_running = "TORCHELASTIC_RUN_ID" in environment
    if _can_listen(address, 0) and not _can_listen(address, int(port)) and not is_running:
        advice = "choose another port, or end the program that has it (ss -ltnp shows which)"
        return [Finding(f"{where}; this machine is that one, and the port is in use", "to do", advice)]
    return [Finding(where)]


def _can_listen(address: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((address, port))
        except OSError:
            return False
    return True
