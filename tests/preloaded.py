"""All that ranks of tests need, imported once: processes are forked from one that has imported this.

Importing torch takes seconds of CPU, which a forked process does not pay.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import weakref
from contextlib import suppress
from importlib import import_module
from typing import Any

from tests.harness import ALL

gc.disable()  # importing makes little garbage, and a fifth of the time went into looking for it
# DDP and optimizers import the compiler when they are first used.
OURS = "joinables.trainer", "joinables.zero", "tests.training", "tests.versions"
for name in ("pytest", "torch.distributed.fsdp", "torch._dynamo", *OURS):
    import_module(name)
with suppress(ImportError):  # where the framework is not installed
    import_module("joinables.integrations.lightning")
torch = import_module("torch")
# Or two threads of a fork's first backward renew torch's pool of threads at once, and one of them finds none.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))
# Or each fork takes torch's operators out of their tables when it ends, and copies the memory that it writes to.
finalizers: Any = weakref.finalize
for finalizer in list(finalizers._registry):
    finalizer.atexit = False
# Or each fork frees all of it when it ends, and first looks through it for cycles: half a second each.
kept: list[Any] = [dict(vars(module)) for module in list(sys.modules.values())]
kept.append(kept)
gc.freeze()
gc.enable()

# Or the interpreter empties each module when a fork ends, and copies the memory that it writes to: a tenth of a second.
# This project and Python's library end as in a script, and so do all modules in ``make test-all``.
ENDING_AS_EVER = {"__main__", "join", "joinables", "tests", *sys.stdlib_module_names}
OTHERS = [] if ALL else [name for name in sys.modules if name.partition(".")[0] not in ENDING_AS_EVER]


@atexit.register
def leave_out_others() -> None:
    sys.modules.update(dict.fromkeys(OTHERS))  # type: ignore[arg-type]  # as the interpreter does it later
