"""Checks before this package imports anything else: a module that hides ``join``, and a needless warning.

Raises:
    ImportError: If a file or folder beside the script hides the package ``join``.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path

if sys.argv[:1] == ["-m"] and "joinables" in sys.orig_argv:  # the command, which needs no NumPy
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")

_found = importlib.util.find_spec("join")
if _found and not any(Path(folder, "registry.py").exists() for folder in _found.submodule_search_locations or ()):
    raise ImportError(f"{_found.origin or 'A folder'} hides the package join of this library. Rename it. [J890]")

import joinables._torch  # noqa: E402, F401  # pyright: ignore[reportUnusedImport]
