"""What is installed, and whether it was tried: :func:`look_at_versions` and :func:`look_at_backends`."""

from __future__ import annotations

import importlib.metadata
import platform

import torch
import torch.distributed as dist

import joinables
from joinables._torch.versions import SUPPORTED
from joinables.commands.findings import Finding

TRIED = {
    "Python": ("3.10", "3.11", "3.12", "3.13"),
    "torch": ("2.8", "2.10", "2.12", "2.13", "2.15"),
    "lightning": ("2.5", "2.6"),
    "accelerate": ("1.15",),
    "transformers": ("5.23",),
    "ray": ("2.60",),
    "torchmetrics": ("1.9",),
    "torchdata": ("0.11",),
}
"""With which versions tests were run; ``docs/versions.md`` says which tests."""


def look_at_versions() -> list[Finding]:
    """The versions of Python, torch, this package, and the frameworks that are installed."""
    found = [Finding(f"joinables {joinables.__version__}")]
    told = {"Python": platform.python_version(), "torch": torch.__version__}
    for name in TRIED:
        try:
            found.append(finding_of(name, told.get(name) or importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def finding_of(name: str, version: str) -> Finding:
    """Whether a version was tried."""
    minor, tried = minor_of(version), TRIED[name]
    if ".".join(map(str, minor)) in tried:
        return Finding(f"{name} {version}")
    known = f"{name} {version}: tests were run with {', '.join(tried)}"
    if name == "torch" and minor < minor_of(tried[0]):
        return Finding(known, "to do", f"install one of torch {SUPPORTED}")
    advice = "what torch must have was found; doctor --run trains with it" if name == "torch" else ""
    return Finding(known, "note", advice)


def minor_of(version: str) -> tuple[int, ...]:
    """``(2, 13)`` of ``"2.13.0+cpu"``."""
    return tuple(int(part) for part in version.partition("+")[0].split(".")[:2] if part.isdigit())


def look_at_backends() -> list[Finding]:
    """Look at the backends that carry collectives."""
    if not dist.is_available():
        return [Finding("torch.distributed is not in this torch", "to do", "install a torch that was built with it")]
    found = [
        Finding("gloo")
        if dist.is_gloo_available()
        else Finding("gloo is missing, which carries headers", "to do", "install a torch that was built with gloo")
    ]
    if not torch.cuda.is_available():
        return [*found, Finding("no GPU that torch can use, so no NCCL")]
    names = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    if dist.is_nccl_available():
        return [*found, Finding(f"NCCL, for {names}")]
    return [*found, Finding(f"{names}, and no NCCL", "note", "gloo copies what is on GPUs through main memory")]
