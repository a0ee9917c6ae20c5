"""Command line ``python -m joinables check``, which runs :mod:`joinables.check`."""

from __future__ import annotations

import argparse
import sys

from joinables.check import check

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m joinables")
    parser.add_argument("command", choices=["check"], help="check this machine, and train on two uneven ranks of it")
    parser.parse_args()
    sys.exit(check())
