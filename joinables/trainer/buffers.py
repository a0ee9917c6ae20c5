"""Buffers that a module's state dict leaves out: :func:`unsaved_buffers` and :func:`put_buffers`.

Checkpoints do without them, since the module says so (``persistent=False``); the module that a fit in other processes
was called with gets them nevertheless, as it does where it is trained in place.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch


def unsaved_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that are not in ``module.state_dict()``, by name."""
    saved = module.state_dict().keys()
    return {name: buffer for name, buffer in module.named_buffers() if name not in saved}


def put_buffers(module: torch.nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    """Give ``module`` the values of ``buffers``: in place, or as new ones where it had none of that shape and type."""
    own = dict(module.named_buffers())
    with torch.no_grad():
        for name, buffer in buffers.items():
            if name in own and (own[name].shape, own[name].dtype) == (buffer.shape, buffer.dtype):
                own[name].copy_(buffer)
            else:
                owner, _, attribute = name.rpartition(".")
                setattr(module.get_submodule(owner), attribute, buffer.clone())
