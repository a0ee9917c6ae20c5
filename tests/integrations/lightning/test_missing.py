"""Without Lightning: a sentence. This runs everywhere."""

from __future__ import annotations

import subprocess
import sys


def test_a_missing_extra_is_a_sentence() -> None:
    code = "import sys; sys.modules['lightning'] = None; import joinables.integrations.lightning"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: joinables.integrations.lightning needs the package lightning")
    assert last.endswith("pip install 'joinables[lightning]' [J126]")
