"""The private torch API that this package calls, with what it stands in for."""

# What is private is not in torch's type stubs, or has no types there.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long an operation of ``group`` may take. Stands in for a getter beside ``set_timeout``."""
    return group._get_backend(group._device_types[0]).options._timeout
