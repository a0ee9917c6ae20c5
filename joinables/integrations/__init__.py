"""Join inside training frameworks: one module for each, which imports it; this one imports no framework.

``joinables.integrations.accelerate``: a block for objects that Accelerate has prepared.
``joinables.integrations.transformers``: a ``Trainer`` of Transformers.
``joinables.integrations.lightning``: a strategy for Lightning's ``Trainer``.

``pip install 'joinables[NAME]'`` installs the framework of the same name.
"""

import os
import warnings


def warn_if_alone(caller: str, processes: int, fix: str) -> None:
    """Warn if a launcher started several processes, and the framework trains in each of them as if it were alone.

    Args:
        caller: The name of the function or class that the user called.
        processes: The number of processes that the framework trains in.
        fix: What to do, as a sentence.
    """
    launched = os.environ.get("WORLD_SIZE", "1")
    if processes == 1 and launched != "1" and "RANK" in os.environ:
        text = f"{caller} trains in num_processes=1, but WORLD_SIZE={launched}: each process trains a model of its own."
        warnings.warn(f"{text} {fix}", stacklevel=3)
