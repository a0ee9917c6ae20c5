"""All that ranks of tests need, imported once: processes are forked from one that has imported this.

Importing torch takes seconds of CPU, which a forked process does not pay.
"""

from __future__ import annotations

import gc
from contextlib import suppress
from importlib import import_module

for name in ("pytest", "torch.distributed.fsdp", "joinables.trainer", "joinables.zero", "tests.versions"):
    import_module(name)
with suppress(ImportError):  # where the framework is not installed
    import_module("joinables.integrations.lightning")
gc.freeze()  # or each fork looks through all of this when it ends, for a second
