"""All time limits that take effect when ranks of a block fail or cannot be reached: :data:`TIMEOUTS`.

No time limit has an effect while nothing fails. The user's time limit, ``Join(..., timeout=)``, is not among these.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Timeouts:
    """Times in seconds.

    Attributes:
        connect: The time in which all ranks of a group make all connections between them for messages. After that, the
            group does without messages.
        look: The interval at which a waiting rank reads the messages of the others, and at which each rank checks
            whether it is asked for its progress.
        note: The longest time in which a failing rank tries to post a note with the reason.
        cause: The longest time for which a rank with a broken collective searches for the rank that failed.
        still: The time for which the other ranks have not moved, before a rank concludes that they wait for it in a
            collective of the loop body.
        end: The time for which a finished rank of the launcher waits for the others before it destroys its process
            group.
        first: The time for which the launcher waits, after a first failure, for the failure that caused it.
        term: The time that a worker of the launcher may take after SIGTERM.
        silent: The time for which a rank may not answer, while nothing has broken, before it counts as gone.
        beat: The interval at which a rank writes to the store that its process lives, if no shared memory shows that.
        explain: The time without a movement of any rank of a block, before a waiting rank logs the places of all ranks.
        idle: The time without a block after which a group's thread ends, which the next block then starts again.
        abort: The time after the failure of a rank in which the others may find it themselves, before their operations
            on accelerators are aborted.
    """

    connect: float = 10.0
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
