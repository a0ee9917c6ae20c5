"""A simulated accelerator: what breaks on GPUs only, shown without one.

:func:`install` makes the device ``"sim"`` and the process group backend ``"simccl"`` known to torch. It registers them
for the whole process, where torch then has an accelerator, so it is called in processes of their own. The device
computes on the CPU, and each time that the host would wait for it, a recorder is told. The backend fails as NCCL does
(``native/backend.cpp``).

The part in C++ is compiled on first use (half a minute on two cores), into ``build/``.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.accelerator import device_module

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / f"accelerator-{torch.__version__}"
NATIVE = Path(__file__).parent / "native"
SOURCES = [NATIVE / name for name in ("device.cpp", "backend.cpp")]
NAME = "simulated_accelerator"
COMMUNICATORS = 2
"""Each process group has so many: one for each device that a process uses in it."""
SCRIPTS = Path(sysconfig.get_path("scripts"))
"""Where packages put their programs; on no ``PATH`` if the virtual environment was not activated."""
_libraries: list[torch.library.Library] = []  # a library's kernels are unregistered with it


def _path() -> str:
    return os.pathsep.join([str(SCRIPTS), os.environ.get("PATH", os.defpath)])


def why_not() -> str:
    """Why there can be no simulated accelerator here; empty if there can."""
    if sys.platform != "linux":
        return "the simulated accelerator is built on Linux only"
    if not dist.is_available() or not dist.is_gloo_available():
        return "torch has no gloo, over which the simulated accelerator communicates"
    if not shutil.which(os.environ.get("CXX", "c++")):
        return "no C++ compiler (c++, or what CXX names) to build the simulated accelerator with"
    if not shutil.which("ninja", path=_path()):
        return "no ninja to build the simulated accelerator with; it comes with the extra joinables[test]"
    return ""


def build() -> Path:
    """Compile the extension if something of it has changed; one process at a time does so, and others wait for it.

    Returns:
        the extension module's file.

    Raises:
        RuntimeError: if it can't be compiled; the text is what the compiler wrote.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    library, stamp = FOLDER / f"{NAME}.so", FOLDER / "built-from"
    with (FOLDER / "building").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        sources = _digest()
        if not (library.exists() and stamp.exists() and stamp.read_text() == sources):
            _compile()
            stamp.write_text(sources)
    return library


def _digest() -> str:
    """A number of all that the extension is made from."""
    found = hashlib.sha256(f"{sys.implementation.cache_tag} {torch.__version__}".encode())
    for path in sorted(NATIVE.iterdir()):
        found.update(path.read_bytes())
    return found.hexdigest()


def _compile() -> None:
    """In a process of its own: torch loads what it has compiled, and this one may only want to know that it works."""
    (FOLDER / "lock").unlink(missing_ok=True)  # torch's own, which stays if the process that made it was killed
    environment = {**os.environ, "PATH": _path(), "PYTHONPATH": str(ROOT), "MAX_JOBS": str(len(SOURCES))}
    command = [sys.executable, "-c", "from tests.accelerator.simulated import load; load()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the simulated accelerator could not be built:\n{done.stdout}\n{done.stderr}")


def load() -> None:
    """Compile and load the extension."""
    from torch.utils import cpp_extension

    cpp_extension.load(
        NAME,
        [str(path) for path in SOURCES],
        extra_cflags=["-O0", "-g0", "-w"],
        build_directory=str(FOLDER),
        with_cuda=False,
    )


def install() -> None:
    """Make the device and the backend known to torch, in this process; only the first call does something."""
    if device_module.extension is not None:
        return
    spec = importlib.util.spec_from_file_location(NAME, build())
    assert spec is not None and spec.loader is not None
    device_module.extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(device_module.extension)
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", device_module)
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    dist.Backend.register_backend("simccl", _make_backend, devices=["sim"])
    if not torch._C._dispatch_has_backend_fallback(torch._C.DispatchKey.AutogradPrivateUse1):  # torch 2.8
        _libraries.append(torch.library.Library("_", "IMPL"))
        _libraries[-1].fallback(torch.library.fallthrough_kernel, "AutogradPrivateUse1")


def _make_backend(store: dist.Store, rank: int, ranks: int, timeout: timedelta) -> Any:
    inner = [
        dist.ProcessGroupGloo(dist.PrefixStore(f"communicator-{number}", store), rank, ranks, timeout)
        for number in range(COMMUNICATORS)
    ]
    return device_module.extension.SimulatedBackend(inner, store, timeout.total_seconds())


def configure(*, devices: int = 4, delay: float = 0.0, stall: float = 30.0, watchdog: float = 30.0) -> None:
    """Set how the device and the backend behave in this process from now on; what is left out has its default.

    Args:
        devices: how many there are.
        delay: seconds by which results of collectives come late.
        stall: seconds after which a collective that peers do not take part in counts as one that never ends. Until
            then the host waits for it, where with NCCL it would go on at once.
        watchdog: seconds for which the device may hang before the process is aborted.
    """
    device_module.extension.configure(devices, delay, stall, watchdog)


def hangs() -> bool:
    """Whether this process's devices hang now."""
    return device_module.extension.hangs()


def record_waits(recorder: Callable[[str], None] | None) -> None:
    """Call ``recorder`` with the name of what the host waits for, each time that it does, where it does."""
    device_module.extension.record_waits(recorder)
