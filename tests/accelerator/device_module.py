"""``torch.sim``: for the simulated accelerator (``simulated.py``), what ``torch.cuda`` is for GPUs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from typing_extensions import override

extension: Any = None  # the compiled part; set when it is loaded

Device = torch.device | str | int | None


def index_of(device: Device) -> int:
    """The number of a device, which is the current one if none is told."""
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        device = device.index
    return extension.current_device() if device is None else device


class device(AbstractContextManager[None]):
    """Within the context, another device is the current one."""

    def __init__(self, device: Device) -> None:
        self._index = index_of(device)

    @override
    def __enter__(self) -> None:
        self._before = extension.current_device()
        extension.set_device(self._index)

    @override
    def __exit__(self, *exc: object) -> None:
        extension.set_device(self._before)


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_compiled() -> bool:  # pyright: ignore[reportUnusedFunction]  # torch asks
    return True


def _is_in_bad_fork() -> bool:  # pyright: ignore[reportUnusedFunction]  # torch asks
    return False


def device_count() -> int:
    return extension.device_count()


def current_device() -> int:
    return extension.current_device()


def set_device(device: Device) -> None:
    extension.set_device(index_of(device))


def synchronize(device: Device = None) -> None:
    torch.accelerator.synchronize(index_of(device))


def Stream(device: Device = None, priority: int = 0) -> torch.Stream:
    return torch.Stream(device=torch.device("sim", index_of(device)), priority=priority)


def Event(*args: Any, **options: Any) -> torch.Event:
    return torch.Event(device=torch.device("sim"))


def current_stream(device: Device = None) -> torch.Stream:
    return torch.accelerator.current_stream(index_of(device))


def default_stream(device: Device = None) -> torch.Stream:
    return current_stream(device)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else stream


# Random numbers come from the CPU's generator.
def manual_seed(seed: int) -> None:
    pass


def manual_seed_all(seed: int) -> None:
    pass


def get_rng_state(device: Device = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Device = None) -> None:
    pass


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_bf16_supported(*args: object) -> bool:
    return True


def empty_cache() -> None:
    pass


def memory_stats(device: Device = None) -> dict[str, int]:
    return {}


def memory_allocated(device: Device = None) -> int:
    return extension.memory_held(index_of(device))


def max_memory_allocated(device: Device = None) -> int:
    return extension.peak_memory(index_of(device))


def reset_peak_memory_stats(device: Device = None) -> None:
    extension.reset_peak(index_of(device))
