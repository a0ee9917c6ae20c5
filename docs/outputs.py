"""Run the scripts that the documentation shows: ``python -m docs.outputs [NAME...]`` keeps what they print.

What a script prints goes to ``docs/outputs``, beside which ``docs/site.py`` puts its code; of the demo, the picture is
kept too. It takes minutes, so it is not a part of ``make docs``; a test compares the words with those of a run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
OUTPUTS = DOCS / "outputs"
COLOURS = 32
LIMIT = 600  # seconds


def scripts() -> list[Path]:
    """What has a page of its own, in order."""
    return [*sorted(ROOT.glob("tutorials/[0-9]*.py")), *sorted(ROOT.glob("recipes/[a-z]*.py"))]


def output_of(script: Path) -> Path:
    """Where that is kept which a script prints."""
    return OUTPUTS / script.parent.name / f"{script.stem}.txt"


def run(*arguments: str) -> str:
    """What a script prints; it ends this one if it fails."""
    ways = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=ways, stdout=subprocess.PIPE, text=True, timeout=LIMIT
    )
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} ended with {done.returncode}")
    return done.stdout


def run_demo() -> None:
    """The demo: what it prints, and its picture, in few colours."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        told = run("-m", "demo", "--out", folder)
        with Image.open(Path(folder, "timeline.png")) as picture:
            picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(DOCS / "demo.png", optimize=True)
    (OUTPUTS / "demo.txt").write_text(told.partition("\nWrote ")[0])


def main(*names: str) -> None:
    """Run the scripts of these names, or all, and the demo."""
    for script in scripts():
        if not names or script.stem in names:
            print(script.relative_to(ROOT), flush=True)
            told = run(str(script))
            output_of(script).parent.mkdir(parents=True, exist_ok=True)
            output_of(script).write_text(told)
    if not names or "demo" in names:
        print("demo", flush=True)
        run_demo()


if __name__ == "__main__":
    main(*sys.argv[1:])
