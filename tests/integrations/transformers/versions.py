"""What the versions of Transformers and Accelerate that are supported differ in, as far as tests are concerned."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from typing import Any

import torch

_trainer: Any = None
_version = ""
if find_spec("transformers") is not None:
    import transformers

    _trainer, _version = transformers.Trainer, transformers.__version__
    # The CPU is cpu:0 in Accelerate 1.11. A Trainer loads states to it, and torch.load does not know it.
    torch.serialization.register_package(  # pyright: ignore[reportUnknownMemberType]
        0, lambda _: None, lambda storage, location: storage if location.startswith("cpu:") else None
    )

_shifts = _version and "_loss_shifts_labels" in inspect.getsource(_trainer._get_num_items_in_batch)
FIRST_TOKEN = 1 if _shifts else 0
"""The first token of a row that a Trainer counts: Transformers 5.16 leaves out the one that has no loss."""
PRECISION = 6e-5 if _version.startswith("4.") else 1e-5
"""The precision of the losses that a Trainer logs: Transformers 4.57 rounds them to four digits."""
ITS_LOOP_IS_ONE_METHOD = not hasattr(_trainer, "_run_epoch")
"""Whether a Trainer has one method for its loop, as before Transformers 5.3; the tokens of dummies count in it."""
