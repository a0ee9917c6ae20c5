"""The files through which the parent and the workers of a launch hand each other data: :class:`Payload`.

They are in one folder::

    call           fn and its arguments, from the parent, until all have read it; forked workers have them
    began-RANK     empty: the worker has read the call
    result         what fn returned on rank 0
    returned-RANK  empty: fn has returned on another rank
    failure-RANK   what a rank raised, as an ``Account``

A file is read when its writer has sent a message that it is there, or has ended, so none is read half-written.
"""

from __future__ import annotations

import inspect
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import torch

from join.collectives._torch_private import pytree
from join.errors import described
from joinables.trainer.launch.errors import Account, Failure, NotPicklable

Call: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]
"""``fn`` and its arguments."""

Event: TypeAlias = Literal["began", "returned"]


@dataclass(frozen=True)
class Payload:
    """The files of one launch, in ``folder``."""

    folder: Path

    def write_call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Write ``fn`` and its arguments for the workers.

        Raises:
            NotPicklable: if they cannot be pickled; the message says which argument, and which part of it.
        """
        try:
            _write(self.folder / "call", (fn, args))
        except Exception:
            try:
                named = inspect.signature(fn).bind(*args).arguments
            except (TypeError, ValueError):  # some builtins have no signature, and these may be the wrong arguments
                named = {"args": args}
            for name, value in [("fn", fn), *named.items()]:
                part, error = _unpicklable_part(value)
                if error is not None:
                    raise NotPicklable(
                        f"{name}{part} cannot be pickled for the workers: {described(error)}. Use"
                        " functions and classes from the top level of a file, or start processes by fork"
                        " (start_method='fork'; of a trainer, strategy='ddp_fork') [J230]"
                    ) from error
            raise  # the disk is full

    def read_call(self) -> Call:
        """Read ``fn`` and its arguments, in a worker.

        Raises:
            NotPicklable: if something in them cannot be imported in this process.
        """
        try:
            return _read(self.folder / "call")
        except Exception as error:
            raise NotPicklable(
                f"fn or an argument cannot be found again in a worker: {described(error)}. What they refer"
                ' to has to be in a file that workers can import, and not under if __name__ == "__main__" [J231]'
            ) from error

    def write_result(self, result: Any) -> None:
        """Write rank 0's result, with its tensors moved to the CPU.

        Raises:
            NotPicklable: if it cannot be pickled; the message says which part of it.
        """
        result = pytree.tree_map_only(torch.Tensor, lambda each: each if each.is_meta else each.cpu(), result)
        try:
            _write(self.folder / "result", result)
        except Exception:
            part, error = _unpicklable_part(result)
            if error is None:
                raise  # the disk is full
            raise NotPicklable(
                f"result{part} of rank 0 cannot be pickled: {described(error)}. Return values and state_dicts [J232]"
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

    def mark(self, event: Event, rank: int) -> None:
        """Leave a mark that ``fn`` has begun, or has returned, on ``rank``."""
        (self.folder / f"{event}-{rank}").touch()

    def has(self, event: Event, rank: int) -> bool:
        """Whether ``rank`` has left that mark."""
        return (self.folder / f"{event}-{rank}").exists()

    def drop_call(self, world_size: int) -> None:
        """Remove the call, once all ranks have read it: writing a large one to the disk would delay a large result."""
        if all(self.has("began", rank) for rank in range(world_size)):
            (self.folder / "call").unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove all files, in a worker whose parent has died; several workers may do so at once."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _write(path: Path, value: Any) -> None:
    with path.open("wb") as file:
        pickle.dump(value, file, protocol=5)


def _read(path: Path) -> Any:
    with path.open("rb") as file:
        return pickle.load(file)


def _unpicklable_part(value: Any, above: Sequence[Any] = ()) -> tuple[str, Exception | None]:
    """Which part of ``value`` cannot be pickled, as code would write it (``.a[0]``), and the error, if any."""
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
    """The items or attributes that are pickled with ``value``, each with how code would write it."""
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
