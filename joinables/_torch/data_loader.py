"""Every private API of torch's ``DataLoader`` that this package uses, with what it stands in for."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch.utils.data import DataLoader

LoaderT = TypeVar("LoaderT", bound=DataLoader[Any])


def with_parts(loader: LoaderT, **parts: Any) -> LoaderT:
    """A copy of a loader, whatever its class and constructor, with another ``sampler``, say.

    Stands in for assigning those, which ``DataLoader`` forbids. The original keeps its persistent workers.
    """
    copied = copy.copy(loader)
    vars(copied).update(parts, _iterator=None)
    return copied
