"""BatchNorm to SyncBatchNorm and back, in place: :func:`to_sync_batchnorm`, :func:`to_batchnorm`.

torch converts one way only, and returns another module; here a layer's class changes and everything else stays: its
parameters, buffers, hooks and place. Both classes keep their state alike.
"""

from __future__ import annotations

import torch

_KINDS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)


def to_sync_batchnorm(module: torch.nn.Module) -> None:
    """Make every BatchNorm layer synchronise its statistics over the default process group."""
    for layer in module.modules():
        kind = type(layer)
        if kind in _KINDS:
            vars(layer).update(_was=kind, process_group=torch.distributed.group.WORLD)
            layer.__class__ = torch.nn.SyncBatchNorm


def to_batchnorm(module: torch.nn.Module) -> None:
    """Undo :func:`to_sync_batchnorm`; layers that were SyncBatchNorm before stay so."""
    for layer in module.modules():
        kind = vars(layer).get("_was")
        if kind is not None:
            layer.__class__ = kind
            del layer._was, layer.process_group
