"""What each rank did in a block, event by event, behind ``Join.trace``: what is in a file, and where files are.

Each rank writes a file of its own when it leaves the block, also with an exception: nobody has to come for it. It is
JSON, one object:

``format``, ``version``
    :data:`FORMAT` and :data:`VERSION`.
``rank``, ``world_size``, ``host``, ``process``
    Who wrote it: the rank in the block's group, the name of its machine, and its process.
``entered``
    When it entered the block, in seconds since 1970 by the clock of its machine. All other times are in seconds since
    then.
``traced_from``, ``ended``, ``error``
    When ``join.trace`` was called, when the rank left the block, and the exception that it left with, or ``null``.
``joinables``
    The names of what is listed, in the order of the list: the same on all ranks. Events have positions in it.
``announced``, ``shadowed``
    For each of these, how often this rank announced it, and how often it took part in another rank's (on a dummy, in a
    loop over ``join.iterate``), in the whole block.
``left_out``
    How many events are missing: the oldest ones, where there were more than :data:`MOST_EVENTS`.
``columns``, ``events``
    The events, each a list of what ``columns`` names: its kind, when it began and ended, of what it is, and a number.

The kinds of events:

==============  ====================================================================================================
``announced``   The rank tells that it is about to run a burst of a joinable. The number counts the bursts of that
                joinable in the block: the same burst has the same number on all ranks. ``null`` is one that is covered
                by the announcement of another: DDP's broadcast of buffers by the backward.
``dummy``       The same on a dummy of a loop over ``join.iterate``, where nothing is sent.
``ran``         The rank runs a burst itself. It has no length where its end is not seen: of joinables that do not tell
                it, and of a backward in ``join.iterate`` after which nothing is to be done.
``shadowed``    The rank takes part in a burst of others with nothing to say, with all that follows it.
``unfinished``  A burst, run or shadowed, that had begun and not ended when the rank left with an exception.
``sent``        A header, or a roll call of a loop, goes out. The number counts both, the same on all ranks. What it is
                of: what it announces, or ``null``.
``waited``      The rank waits for the others. What it is of: what it does, in words, or ``""`` in a plain block. The
                number is that of the header or roll call that it waits for, and ``null`` if it is none.
``step``        A step of a loop over ``join.iterate``, of ``"data"`` or of ``"dummy"``. The number counts its steps.
``drained``     From where the rank had run out until all had.
==============  ====================================================================================================
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

FORMAT, VERSION = "joinables trace", 1
SUFFIX = ".json"
COLUMNS = ("kind", "begin", "end", "what", "number")
MOST_EVENTS = 100_000
"""How many events a rank keeps, the newest ones; some 5 MB."""


def checked_path(path: Any) -> Path:
    """Return ``path`` if a trace can be written there. No other rank is asked.

    Raises:
        TypeError: if it is no path.
        ValueError: if its name does not end in ``.json``.
        FileNotFoundError: if its folder does not exist.
        PermissionError: if nothing can be written there.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path={path!r} is a {type(path).__name__}; give the name of a file, such as 'run.json' [J281]")
    found = Path(os.fsdecode(cast("str | os.PathLike[str]", path)))
    if found.suffix != SUFFIX:
        raise ValueError(f"path={str(found)!r} does not end in {SUFFIX}; give a name such as 'run.json' [J282]")
    if not os.access(found.parent, os.W_OK | os.X_OK):
        raise PermissionError(
            f"path={str(found)!r}: nothing can be written in {str(found.parent)!r}; give another folder [J284]"
        )
    return found


def part_of(path: Path, rank: int) -> Path:
    """The file of one rank: ``run.rank0.json`` for ``run.json``."""
    return path.with_name(f"{path.stem}.rank{rank}{SUFFIX}")
