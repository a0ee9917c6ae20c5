"""torchrun, whose workers are forked from the process that calls it, so that they need not import torch.

``python -m tests.torchrun`` is torchrun itself.
"""

from __future__ import annotations

import runpy
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch.distributed import run


def forks() -> None:
    """Have ``torch.distributed.run`` fork the workers of this process from now on; all else is torchrun's own."""
    configured: Callable[..., tuple[Any, Any, list[str]]] = run.config_from_args

    def forking(arguments: Any) -> tuple[Any, Any, list[str]]:
        config, _, command = configured(arguments)
        config.start_method = "fork"
        tempfile.tempdir = config.logs_specs.root_log_dir  # for files that torch leaves there for each worker
        return config, _script, [each for each in command if each != "-u"]

    run.config_from_args = forking


def _script(*command: str) -> None:
    """Run a script as the interpreter that torchrun would start."""
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"):  # torchrun's own
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    is_module = command[0] == "-m"
    sys.argv = list(command[is_module:])
    try:
        if is_module:
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command[0], run_name="__main__")
    except Exception:  # which torchrun's own process would write to a file
        traceback.print_exc()
        sys.exit(1)


if __name__ == "__main__":
    import_module("tests.preloaded")
    forks()
    run.main(sys.argv[1:])
