"""``python -m joinables``: looks at a machine before a run (``doctor``)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from joinables.commands import doctor


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m joinables", description="Tools around join.Join.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    doctor.add_to(commands)
    told = parser.parse_args(arguments)
    return told.act(told)


if __name__ == "__main__":
    sys.exit(main())
