"""What parent and workers hand each other through files: :class:`Payload`.

It is a folder::

    call           fn and its arguments, from the parent, until all have read it; forked workers have them
    began-RANK     empty: the worker has read the call
    result         what fn returned on rank 0
    returned-RANK  empty: fn has returned on another rank
    failure-RANK   what a rank raised, as an ``Account``

A file is looked at when its writer has said by message that it is there, or has ended, so none is read half-written.
"""

from __future__ import annotations

import inspect
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch

from join.collectives._torch_private import pytree
from joinables.trainer.launch.errors import NotPicklable
from joinables.trainer.launch.failure import Account, Failure

Call: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]
"""``fn`` and its arguments."""


@dataclass(frozen=True)
class Payload:
    """The files of one launch, in ``folder``."""

    folder: Path

    def write_call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Write what the workers have to do.

        Raises:
            NotPicklable: if that is impossible; the message has the name of the argument, and where in it the cause is.
        """
        try:
            _write(self.folder / "call", (fn, args))
        except Exception:
            for name, value in [("fn", fn), *zip(_names(fn, len(args)), args, strict=True)]:
                part, error = _unpicklable_part(value)
                if error is not None:
                    raise NotPicklable(
                        f"{name}{part} cannot be pickled for the workers: {type(error).__name__}: {error}. Use"
                        " functions and classes from the top level of a file, or start processes by fork"
                        " (start_method='fork'; of a trainer, strategy='ddp_fork')"
                    ) from error
            raise  # the disk is full

    def read_call(self) -> Call:
        """Read what there is to do.

        Raises:
            NotPicklable: if it cannot be found again in this process.
        """
        try:
            return _read(self.folder / "call")
        except Exception as error:
            raise NotPicklable(
                f"fn or an argument cannot be found again in a worker: {type(error).__name__}: {error}. What they refer"
                ' to has to be in a file that workers can import, and not under if __name__ == "__main__"'
            ) from error

    def write_result(self, result: Any) -> None:
        """Write rank 0's result, with its tensors moved to the CPU.

        Raises:
            NotPicklable: if that is impossible; the message says where in it the cause is.
        """
        result = pytree.tree_map_only(torch.Tensor, _to_cpu, result)
        try:
            _write(self.folder / "result", result)
        except Exception:
            part, error = _unpicklable_part(result)
            if error is None:
                raise  # the disk is full
            raise NotPicklable(
                f"result{part} of rank 0 cannot be pickled: {type(error).__name__}: {error}. Return values and"
                " state_dicts"
            ) from error

    def read_result(self) -> Any:
        """Read rank 0's result."""
        return _read(self.folder / "result")

    def write_failure(self, rank: int, error: BaseException) -> None:
        """Write what ``rank`` raised."""
        _write(self.folder / f"failure-{rank}", Account.of(error))

    def read_failure(self, rank: int) -> Failure:
        """Read what ``rank`` raised."""
        account: Account = _read(self.folder / f"failure-{rank}")
        return account.failure(rank)

    def mark_begun(self, rank: int, world_size: int) -> None:
        """Leave a mark that ``rank`` has found ``fn``; the call goes when all have.

        What is still on its way to the disk of a large call would hold up the one who writes a large result.
        """
        (self.folder / f"began-{rank}").touch()
        if all(self.has_begun(each) for each in range(world_size)):
            (self.folder / "call").unlink(missing_ok=True)

    def has_begun(self, rank: int) -> bool:
        """Whether ``rank`` has found ``fn``."""
        return (self.folder / f"began-{rank}").exists()

    def mark_returned(self, rank: int) -> None:
        """Leave a mark that ``fn`` has returned on ``rank``."""
        (self.folder / f"returned-{rank}").touch()

    def has_returned(self, rank: int) -> bool:
        """Whether ``fn`` has returned on ``rank``."""
        return (self.folder / f"returned-{rank}").exists()

    def remove(self) -> None:
        """Remove all of it, for a parent that no longer can; several workers may do so at once."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _write(path: Path, value: Any) -> None:
    with path.open("wb") as file:
        pickle.dump(value, file, protocol=5)


def _read(path: Path) -> Any:
    with path.open("rb") as file:
        return pickle.load(file)


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else tensor.cpu()


def _names(fn: Callable[..., Any], count: int) -> list[str]:
    """The names of the first ``count`` positional parameters."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        parameters = []
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind in named][:count]
    rest = next((each.name for each in parameters if each.kind is inspect.Parameter.VAR_POSITIONAL), "args")
    return names + [f"{rest}[{position}]" for position in range(count - len(names))]


def _unpicklable_part(value: Any, above: Sequence[Any] = ()) -> tuple[str, Exception | None]:
    """Where in ``value`` the trouble is, as one would write it, and what it is; ``None`` if there is none."""
    try:
        pickle.dumps(value)
    except Exception as whole:
        for path, part in _parts(value):
            if any(part is each for each in (*above, value)):
                continue  # it refers back to what holds it
            inner, error = _unpicklable_part(part, (*above, value))
            if error is not None:
                return path + inner, error
        return "", whole
    return "", None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What is pickled with ``value``, and how it is written: items, or attributes."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in cast("Mapping[Any, Any]", value).items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", part) for index, part in enumerate(cast("Sequence[Any]", value)))
    else:
        try:
            state: Any = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)[2]
        except Exception:  # it has no state, or is itself the trouble
            return
        if isinstance(state, Mapping):
            yield from ((f".{name}", part) for name, part in cast("Mapping[str, Any]", state).items())
