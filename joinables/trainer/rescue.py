"""Trained weights that a failure after training would lose: :func:`load_fitting`, :class:`Rescue`.

Hooks of a fit may change the parts of a module, and hooks and states of users may raise after the last step. Hours of
training must not depend on either.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

from join.errors import add_note, described
from joinables.trainer.checkpoint import CheckpointIO, FileCheckpointIO

logger = logging.getLogger("joinables")


def load_fitting(module: torch.nn.Module, weights: Mapping[str, Any]) -> tuple[list[str], str]:
    """Load weights as far as they fit.

    A buffer that is ``None`` here, or has a different shape, is replaced. So is a parameter that is ``None``.

    Returns:
        The names of those that only one of the two sides has, and a sentence if the module's own method has raised.
    """
    raised, kind = "", type(module)
    try:
        module.load_state_dict(weights)
        return [], ""
    except Exception as error:  # torch raises after it has loaded what fits; a method of the user's may raise before
        if kind.load_state_dict is not torch.nn.Module.load_state_dict:
            raised = f"{kind.__name__}.load_state_dict raised {described(error)}, so torch's was called. "
    buffers = dict(module.named_buffers())
    for name, value in weights.items():
        path, _, attribute = name.rpartition(".")
        with suppress(AttributeError):
            owner = module.get_submodule(path)
            if (before := getattr(owner, attribute)) is None or (name in buffers and before.shape != value.shape):
                try:
                    setattr(owner, attribute, value)
                except TypeError:  # a parameter that is None
                    setattr(owner, attribute, torch.nn.Parameter(value))
    shapes = {name: getattr(value, "shape", None) for name, value in module.state_dict().items()}
    fitting = {name: value for name, value in weights.items() if shapes.get(name, 0) == getattr(value, "shape", None)}
    torch.nn.Module.load_state_dict(module, fitting, strict=False)
    return sorted((weights.keys() | shapes.keys()) - fitting.keys()), raised


def weights_only(module: torch.nn.Module, counted: Any) -> dict[str, Any]:
    """Return the part of a snapshot that one rank has; ``counted`` has the numbers of epochs and steps."""
    counts = {"epochs": counted.epochs, "global_step": counted.global_step}
    try:
        weights = module.state_dict()
    except Exception:  # get_extra_state or a hook of the user's raises
        weights = {name: each.detach() for name, each in (*module.named_parameters(), *module.named_buffers())}
    return {**counts, "module": weights, "optimizers": [], "schedulers": []}


@dataclass(frozen=True)
class Rescue:
    """Writer of trained weights that would be lost.

    Attributes:
        folder: The folder of the files.
        io: The object that writes. If it cannot write, a file is written.
    """

    folder: Path
    io: CheckpointIO

    def load_home(self, module: torch.nn.Module, weights: Mapping[str, Any], state: dict[str, Any]) -> None:
        """Load the weights of a fit in other processes; a warning names those that do not fit, and a file with all.

        Args:
            module: The module in this process.
            weights: The weights.
            state: The snapshot of the fit, for the file.
        """
        rest, text = load_fitting(module, weights)
        if rest:
            text += (
                f"A hook of the fit has changed the parts of {type(module).__name__}: {', '.join(rest)} exist either in"
                " the trained module or in this process, or have another shape there. All other weights are loaded"
                " here. To have all of them here too, make these parts in __init__. "
            )
        if text:
            warnings.warn(text + self._kept(state), stacklevel=5)  # at the call of fit

    def keep(self, error: BaseException, state: dict[str, Any]) -> None:
        """Write a checkpoint of the trained module, and add a note with its path to the error that would lose it."""
        add_note(error, kept := f"The module was trained before this error. {self._kept(state)}")
        logger.error(kept)  # Python 3.10 has no notes

    def _kept(self, state: dict[str, Any]) -> str:
        """Write a snapshot and return a sentence with its path, or with the reason why there is none."""
        name = f"trained-epoch={state['epochs']}-step={state['global_step']}"
        paths = (self.folder / f"{name}{f'-v{version}' if version else ''}.ckpt" for version in count())
        path, problem = str(next(path for path in paths if not path.exists())), ""
        file, weights = FileCheckpointIO(), state["module"]
        tensors = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}
        # Entries of a hook, a callback or get_extra_state may be objects that cannot be written, or not be read again.
        for io, kept in ((self.io, state), (file, state), (file, {"module": weights}), (file, {"module": tensors})):
            try:
                io.save_checkpoint(kept, path)
                load = "torch.load" if type(io) is FileCheckpointIO else "trainer.checkpoint_io.load_checkpoint"
                return f"{load}({path!r})['module'] returns the trained weights."
            except Exception as error:
                problem = described(error)
        return f"Its weights could not be saved: {problem}."
