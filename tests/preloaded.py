"""All that ranks of tests need, imported once: processes are forked from one that has imported this.

Importing torch takes seconds of CPU, which a forked process does not pay.
"""

from __future__ import annotations

import gc
import warnings
from importlib import import_module

for name in ("pytest", "torch.distributed.fsdp", "joinables.trainer"):
    import_module(name)
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit.script, used by torch.distributed.optim itself
    import_module("torch.distributed.optim")
gc.freeze()  # or each fork looks through all of this when it ends, for a second
