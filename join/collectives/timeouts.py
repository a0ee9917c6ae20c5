"""All time limits that take effect when ranks of a block fail or cannot be reached: :data:`TIMEOUTS`.

No time limit has an effect while nothing fails. The user's time limit, ``Join(..., timeout=)``, is not among these.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Timeouts:
    """Times in seconds.

    Attributes:
        look: The interval between two reads of the others' messages by a waiting rank, and between two checks of each
            rank whether it is asked for its progress.
        note: The longest time in which a failing rank tries to post a note with the reason.
        cause: The longest search of a rank with a broken collective for the rank that failed.
        still: The time without a movement of the other ranks, before a rank concludes that they wait for it in a
            collective of the loop body.
        end: The longest wait of a finished rank of the launcher for the others before it destroys its process group.
        first: The wait of the launcher, after a first failure, for the failure that caused it.
        term: The time that a worker of the launcher may take after SIGTERM.
        silent: The time without an answer of a rank, while nothing has broken, before it counts as gone.
        beat: The interval between two writes of a rank to the store, which show that its process lives if there is no
            shared memory to show that.
        explain: The time without a movement of any rank of a block, before a waiting rank logs the places of all ranks.
        idle: The time without a block before a group's thread ends. The next block starts the thread again.
        abort: The time after the failure of a rank in which the others may find it themselves, before their operations
            on accelerators are aborted.
    """

    look: float = 0.25
    note: float = 2.0
    cause: float = 3.0
    still: float = 5.0
    silent: float = 30.0
    beat: float = 5.0
    explain: float = 30.0
    idle: float = 5.0
    abort: float = 1.0
    end: float = 5.0
    first: float = 2.0
    term: float = 5.0


TIMEOUTS = Timeouts()
"""The times that are in effect in this process. Tests change them."""
