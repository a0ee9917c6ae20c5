"""All that ranks of tests need, imported once: processes are forked from one that has imported this.

Importing torch takes seconds of CPU, which a forked process does not pay.
"""

from __future__ import annotations

import gc
import warnings

import pytest
import torch.distributed.fsdp

import joinables.trainer

__all__ = ["joinables", "pytest", "torch"]

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit.script, used by torch.distributed.optim itself
    import torch.distributed.optim

gc.freeze()  # or each fork looks through all of this when it ends, for a second
