"""The devices that tests run on, and what they measure on each: where the host waits, and memory."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from tests import gpus
from tests.accelerator import device_module, simulated
from tests.training import Case

ROOT = simulated.ROOT
HERE = Path(__file__)
TORCH = Path(torch.__file__).parent


@dataclass(frozen=True)
class Target:
    """A kind of device, and the backend of process groups for its tensors."""

    device: str
    backend: str

    @override
    def __str__(self) -> str:
        return f"{self.device}-{self.backend}"

    @property
    def is_simulated(self) -> bool:
        return self.device == "sim"

    def why_not(self) -> str:
        """Why nothing can run on it here; empty if something can."""
        return simulated.why_not() if self.is_simulated else ""

    def ranks(self, most: int = 3) -> int:
        """How many ranks it takes; with NCCL, each has a GPU, or all share the only one."""
        gpus = torch.cuda.device_count()
        return min(most, gpus) if self.backend == "nccl" and gpus > 1 else most

    def device_of(self, rank: int) -> torch.device:
        """The device of a rank."""
        return gpus.device_of_rank(self.device, self.backend, rank)

    def place(self, case: Case) -> Case:
        """The case on this device, with as many ranks as it takes: the first ones."""
        counts = tuple(each[: self.ranks(len(each))] for each in case.data.counts)
        return replace(case, model=replace(case.model, device=self.device), data=replace(case.data, counts=counts))


CPU = Target("cpu", "gloo")
"""What the others are compared with, where that is not one process."""
SIMULATED = Target("sim", "simccl")
TARGETS = [SIMULATED]
if torch.cuda.is_available():
    TARGETS += [Target("cuda", "nccl"), Target("cuda", "gloo")]


def prepare_simulated(rank: int) -> None:
    """What a rank does before it uses the simulated device: that of its number is the current one."""
    simulated.install()
    simulated.configure()
    device_module.set_device(rank)


def device_of_rank(target: Target) -> torch.device:
    """The device of this rank, which becomes the current one."""
    device = target.device_of(dist.get_rank())
    torch.accelerator.set_device_index(device)
    return device


@dataclass(frozen=True)
class Wait:
    """A time that the host waited for the device.

    Attributes:
        what: what it waited for.
        who: the functions that led there, as file:line:name, innermost first, without torch's.
    """

    what: str
    who: tuple[str, ...]

    @property
    def function(self) -> str:
        """The innermost function, as file:name."""
        file, _, name = self.who[0].split(":") if self.who else ("", "", "")
        return f"{file}:{name}"

    @property
    def is_ours(self) -> bool:
        """Whether the library under test asked for it."""
        return bool(self.who) and self.who[0].startswith(("join/", "joinables/"))


@contextmanager
def waits(target: Target) -> Generator[list[Wait]]:
    """Within the context, the times that this process's host waits for the device are found."""
    found: list[Wait] = []

    def record(what: str) -> None:
        found.append(Wait(what, _callers()))

    if target == CPU:
        yield found
        return
    with _recording_simulated(record) if target.is_simulated else _recording_cuda(record):
        yield found


@contextmanager
def _recording_simulated(record: Any) -> Generator[None]:
    simulated.record_waits(record)
    try:
        yield
    finally:
        simulated.record_waits(None)


@contextmanager
def _recording_cuda(record: Any) -> Generator[None]:
    """torch warns of each wait. Those in a backward's own threads are told when it has ended, so of the call of it."""

    def seen(message: Warning | str, *args: Any, **options: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            record("a synchronising operation")

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = seen
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _callers() -> tuple[str, ...]:
    frames = [(Path(frame.filename), frame) for frame in reversed(traceback.extract_stack())]
    passing = HERE, Path(warnings.__file__)  # a wait of CUDA's is a warning
    outside = [(path, frame) for path, frame in frames if path not in passing and not path.is_relative_to(TORCH)]
    return tuple(f"{_short(path)}:{frame.lineno}:{frame.name}" for path, frame in outside)


def _short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


def memory_of(target: Target) -> Any:
    """The module that counts bytes on a device, as ``torch.cuda`` does."""
    return device_module if target.is_simulated else torch.cuda
