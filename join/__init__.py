"""Join: train together on different amounts of data.

``with Join([model, optimizer]):`` around a training loop, and every rank may have a different number of batches.
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
