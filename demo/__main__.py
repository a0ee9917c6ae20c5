"""The command line: ``python -m demo [--epochs N] [--out DIR]``."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path

EXTRAS = {"sklearn": "scikit-learn", "matplotlib": "matplotlib"}


def main() -> None:
    """Train, compare, print the text, and write the picture and the JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m demo",
        description="Train on uneven ranks with this library's Join and torch's; compare both with a single process.",
    )
    parser.add_argument("--epochs", metavar="N", type=_positive, default=3, help="epochs to train (default: 3)")
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=Path("demo-out"), help="folder to write to (default: demo-out)"
    )
    options = parser.parse_args()
    missing = [name for module, name in EXTRAS.items() if importlib.util.find_spec(module) is None]
    if missing:
        sys.exit(f"The demo needs {' and '.join(missing)}: pip install '.[demo]', in the clone")

    from demo.experiment import run_experiment
    from demo.picture import draw
    from demo.summary import as_json, as_text

    started = time.monotonic()
    experiment = run_experiment(options.epochs)
    print(as_text(experiment))
    result, picture = options.out / "result.json", options.out / "timeline.png"
    options.out.mkdir(parents=True, exist_ok=True)
    _replace(result, as_json(experiment).encode())
    _replace(picture, draw(experiment))
    print(f"\nWrote {result} and {picture}; all in {time.monotonic() - started:.0f} s.")
    if not experiment.promise_kept:
        sys.exit("The result of this library's Join is not the result of a single process. Please report this output.")


def _replace(path: Path, content: bytes) -> None:
    """Write under another name first, so that no reader sees half a file."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


if __name__ == "__main__":
    main()
