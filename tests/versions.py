"""What the versions of torch that are supported differ in, as far as tests are concerned."""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

_settings = inspect.signature(DistributedDataParallel.__init__).parameters
_own_buffers = "forward_sync_buffers" if "forward_sync_buffers" in _settings else "broadcast_buffers"
OWN_BUFFERS: dict[str, Any] = {_own_buffers: False}
"""What keeps forwards of a DDP module from broadcasting buffers: by its newer name from torch 2.13 on."""

all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""``all_gather_into_tensor`` by its newer name, from torch 2.13 on."""

is_2_8 = torch.__version__.startswith("2.8.")
CLIPS_COARSELY = is_2_8
"""Whether clipping of sharded gradients adds its 1e-6 to the norm of each shard, and not to that of all."""

GATHERS_WHAT_IS_USED_AGAIN = not (is_2_8 or torch.__version__.startswith("2.10."))
"""Whether ``fully_shard`` gathers a module that is used again after a checkpointed one that it is in."""

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.8 has no Muon")
needs_gloo_with_limits = pytest.mark.skipif(
    is_2_8, reason="torch 2.8 cannot change how long operations of a gloo group may take"
)
needs_silent_gloo = pytest.mark.skipif(is_2_8, reason="gloo of torch 2.8 prints in the middle of lines")


def own_lines(stdout: str) -> str:
    """What a program has printed, without what gloo prints in torch 2.8."""
    return "".join(line for line in stdout.splitlines(keepends=True) if not line.startswith("[Gloo] "))


def remove_temporary_folders(folder: Path) -> None:
    """Remove what a killed process leaves there because torch 2.8 makes a temporary folder when it is imported."""
    if is_2_8:
        for left in folder.glob("tmp*"):
            shutil.rmtree(left)


if is_2_8:
    # gloo sums there where fully_shard asks for the mean: let it ask for the sum and divide, as for some other devices.
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as _collectives

    _factors = _collectives._get_gradient_divide_factors  # pyright: ignore[reportPrivateUsage]
    _collectives._get_gradient_divide_factors = lambda *given: _factors(*given[:5], True)  # pyright: ignore
