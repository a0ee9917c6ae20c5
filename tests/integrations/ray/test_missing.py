"""Without Ray: a sentence. This runs everywhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TUTORIAL = Path(__file__).parents[3] / "tutorials" / "13_ray.py"


def test_a_missing_extra_is_a_sentence() -> None:
    # Joblib, which scikit-learn imports, looks for Ray, too.
    forget = "import runpy, sys, sklearn.datasets; sys.modules['ray'] = None"
    code = f"{forget}; runpy.run_path({str(TUTORIAL)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert done.stderr == "This tutorial needs Ray: pip install 'joinables[ray]'\n"
