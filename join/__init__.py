"""Training on ranks that have different numbers of batches.

Put ``with Join([model, optimizer]):`` around a training loop. A rank that is out of data keeps taking part in the
collectives of the other ranks until all ranks are done. The result equals the result of a single process.
"""

from join.context import Join
from join.errors import EarlyTerminationError, JoinError, JoinTimeoutError, PeerError, ProtocolError
from join.joinable import Burst, Joinable, JoinConfig, JoinHook
from join.registry import register_joinable
from join.report import JoinReport

__all__ = [
    "Burst",
    "EarlyTerminationError",
    "Join",
    "JoinConfig",
    "JoinError",
    "JoinHook",
    "JoinReport",
    "JoinTimeoutError",
    "Joinable",
    "PeerError",
    "ProtocolError",
    "register_joinable",
]
