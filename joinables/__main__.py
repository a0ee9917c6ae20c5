"""Command line: ``python -m joinables check`` and ``python -m joinables explain CODE``."""

from __future__ import annotations

import argparse
import os
import sys

from joinables.check import check
from joinables.explain import explain


def main() -> int | str | None:
    """Run a command and return its exit status, or a text about its failure."""
    parser = argparse.ArgumentParser(prog="python -m joinables")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="check this machine, and train on two uneven ranks of it")
    explains = commands.add_parser("explain", help="print the meaning of an error, and what to do")
    explains.add_argument("code", help="the code in the text of the error, such as J441")
    options = parser.parse_args()
    if options.command == "check":
        # Its ranks are new processes, and torch would warn in each of them if NumPy is missing.
        os.environ.setdefault("PYTHONWARNINGS", "ignore:Failed to initialize NumPy:UserWarning")
        return check()
    text = explain(options.code.strip("[]"))
    return print(text) if text else f"No error has the code {options.code}. A code is a J and three digits."


if __name__ == "__main__":
    sys.exit(main())
