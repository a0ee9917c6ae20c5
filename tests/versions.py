"""What the versions of torch that are supported differ in, as far as tests are concerned."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

_settings = inspect.signature(DistributedDataParallel.__init__).parameters
OWN_BUFFERS = {"forward_sync_buffers" if "forward_sync_buffers" in _settings else "broadcast_buffers": False}
"""What keeps forwards of a DDP module from broadcasting buffers: by its newer name from torch 2.13 on."""

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
