"""A gate adds to a loss what it needs to reach the module, and nothing to a loss that reaches it."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from joinables import LossGate


def test_a_loss_that_reaches_the_module_is_returned_as_it_is() -> None:
    gate = LossGate(nn.Linear(2, 1))
    loss = gate.trained(torch.ones(1, 2)).sum() * 2
    assert gate(loss) is loss
    with torch.no_grad():
        loss = gate.trained(torch.ones(1, 2)).sum()
    assert gate(loss) is loss


def test_a_loss_behind_a_reentrant_checkpoint_is_returned_as_it_is() -> None:
    """Its graph shows no parameter, and the backward that the checkpoint runs reaches them."""
    gate = LossGate(nn.Linear(2, 1))
    loss = checkpoint(gate.trained, torch.ones(1, 2, requires_grad=True), use_reentrant=True).sum()
    assert gate(loss) is loss


def test_a_loss_that_reaches_nothing_gives_gradients_of_0() -> None:
    gate = LossGate(nn.Linear(2, 1))
    gate(torch.tensor(3.0, requires_grad=True)).backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in gate.parameters())
