"""What can go wrong inside a :class:`join.Join` block, one class a cause.

Every one of them is raised on all ranks that the cause concerns, and none of them leaves a collective half done, so
the process group can be used afterwards. The exception is :class:`JoinTimeoutError`: the missing rank never took part.
"""


class JoinError(RuntimeError):
    """Base of all errors of this package: a ``Join`` block could not be carried out as written."""


class EarlyTerminationError(JoinError):
    """A rank ran out of inputs under ``throw_on_early_termination=True``; raised on every rank at the same step."""


class PeerError(JoinError):
    """Another rank raised inside the block; the message carries its rank and its exception's text."""


class ProtocolError(JoinError):
    """Active ranks announced different things, so their collectives could not have matched."""


class JoinTimeoutError(JoinError):
    """A rank did not announce anything within ``timeout`` seconds; the message says who announced what."""
