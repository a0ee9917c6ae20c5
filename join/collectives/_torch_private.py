"""The private torch API that this package calls, with what it stands in for."""

# What is private is not in torch's type stubs, or has no types there.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long an operation of ``group`` may take. Stands in for a getter beside ``set_timeout``."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return getattr(options, "_timeout", default_pg_timeout)
