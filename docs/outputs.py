"""Run the scripts that the documentation shows, and save their output: ``python -m docs.outputs [NAME...]``.

The output of a script is saved in ``docs/outputs``, and the picture of the demo as ``docs/demo.png``. ``docs/site.py``
shows the output below the code. The runs take minutes, so ``make docs`` does not start them. A test compares the words
of a saved output with a run.
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
    """Return the scripts that have a page, in order."""
    return [*sorted(ROOT.glob("tutorials/[0-9]*.py")), *sorted(ROOT.glob("recipes/[a-z]*.py"))]


def output_of(script: Path) -> Path:
    """Return the file that holds the output of a script."""
    return OUTPUTS / script.parent.name / f"{script.stem}.txt"


def run(*arguments: str) -> str:
    """Run Python with these arguments and return the output; exit if the run fails."""
    ways = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=ways, stdout=subprocess.PIPE, text=True, timeout=LIMIT
    )
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} ended with {done.returncode}")
    return done.stdout


def run_demo() -> None:
    """Save the output of the demo, and its picture in few colours."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        output = run("-m", "demo", "--out", folder)
        with Image.open(Path(folder, "timeline.png")) as picture:
            picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(DOCS / "demo.png", optimize=True)
    (OUTPUTS / "demo.txt").write_text(output.partition("\nWrote ")[0])


def main(*names: str) -> None:
    """Run the scripts of these names, or all scripts and the demo."""
    for script in scripts():
        if not names or script.stem in names:
            print(script.relative_to(ROOT), flush=True)
            output = run(str(script))
            output_of(script).parent.mkdir(parents=True, exist_ok=True)
            output_of(script).write_text(output)
    if not names or "demo" in names:
        print("demo", flush=True)
        run_demo()


if __name__ == "__main__":
    main(*sys.argv[1:])
