"""Checks of ``Join``'s arguments that need no communication; ``join.agreement`` compares them between ranks."""

from __future__ import annotations

import difflib
import inspect
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, cast

import torch
import torch.distributed as dist

from join.collectives import Collective, SingleCollective, collective_of
from join.joinable import Joinable, JoinHook
from join.registry import joinables_of

OWN_KEYWORDS = (
    "enable",
    "throw_on_early_termination",
    "timeout",
    "process_group",
    "loss_divided_by",
    "divide_by_initial_world_size",
)
"""What ``Join`` takes besides what it hands to hooks."""
_SCALARS = (bool, int, float, str, type(None))


def checked_timeout(timeout: Any) -> float | None:
    """Return ``timeout`` if it is one.

    Raises:
        TypeError: if it is no number.
        ValueError: if it is not positive and finite.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout={timeout!r} must be a number of seconds, or None to wait for ever [J001]")
    if not (math.isfinite(timeout) and timeout > 0):
        raise ValueError(f"timeout={timeout!r} must be a positive number of seconds, or None to wait for ever [J002]")
    return timeout


def checked_weight(weight: Any, name: str) -> float:
    """Return ``weight`` if it is one; ``name`` says where it comes from.

    Raises:
        TypeError: if it is no number.
        ValueError: if it is negative or not finite.
    """
    if isinstance(weight, torch.Tensor) and weight.numel() == 1:
        weight = weight.item()
    if isinstance(weight, bool) or not isinstance(weight, Real):
        raise TypeError(f"{name} is {weight!r}, which is no number; give the number of samples or tokens [J006]")
    number = float(weight)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(
            f"{name} is {weight!r}, and must be finite and not negative: the number of samples or tokens [J007]"
        )
    return number


def checked_divisor(divisor: Any) -> int:
    """Return ``loss_divided_by`` if it is a number of micro-batches.

    Raises:
        TypeError: if it is no whole number.
        ValueError: if it is less than 1.
    """
    if isinstance(divisor, bool) or not isinstance(divisor, Integral):
        raise TypeError(f"loss_divided_by={divisor!r} must be a whole number: the micro-batches in a window [J008]")
    if divisor < 1:
        raise ValueError(f"loss_divided_by={divisor} must be at least 1: the micro-batches in a window [J009]")
    return int(divisor)


def listed(objects: Any, group: Any) -> list[Any]:
    """Return the objects given to ``Join``.

    Args:
        objects: what was given.
        group: the process group that was given; ``...`` if none was.

    Raises:
        TypeError: if ``objects`` is no list.
        ValueError: if it is empty, and no group was given.
    """
    # Sequential and ModuleList can be iterated, and would be taken for a list of layers.
    if isinstance(objects, (torch.nn.Module, str)) or not isinstance(objects, Iterable):
        raise TypeError(f"joinables is a {type(objects).__name__}, not a list; write Join([...]) [J010]")
    objects = list(cast("Iterable[Any]", objects))
    if not objects and group is ...:
        raise ValueError(
            "joinables=[] is empty: Join requires at least one joinable; for loops over join.iterate that train nothing"
            " write Join([], process_group=None), or give their group [J011]"
        )
    return objects


def expand(objects: Sequence[Any]) -> list[Joinable]:
    """Turn the objects given to ``Join`` into joinables, each object once.

    Raises:
        TypeError: if one cannot join.
        ValueError: if one is there twice.
    """
    expanded: list[Joinable] = []
    seen: dict[int, int] = {}
    for position, obj in enumerate(objects):
        joinables = joinables_of(obj)
        for joinable in joinables:
            check_initialised(joinable)
        for target in {id(joinable.join_target): joinable.join_target for joinable in joinables}.values():
            if id(target) in seen:
                raise ValueError(
                    f"joinables[{seen[id(target)]}] and joinables[{position}] are the same {type(target).__name__};"
                    " list it once [J012]"
                )
            seen[id(target)] = position
        expanded += joinables
    return expanded


def hook_of(joinable: Joinable, kwargs: Mapping[str, Any]) -> JoinHook:
    """Return a joinable's hook for a block.

    Raises:
        TypeError: if ``join_hook`` returned none.
    """
    hook: Any = joinable.join_hook(**kwargs)
    if callable(getattr(hook, "main_hook", None)) and callable(getattr(hook, "post_hook", None)):
        return hook
    raise TypeError(f"join_hook of {joinable.join_name} returned {hook!r}; return a JoinHook [J014]")


def common_collective(joinables: Sequence[Joinable], group: Any, *, enable: bool) -> Collective:
    """Return the collective of the joinables' group; one of this process alone if nothing has to communicate.

    Args:
        joinables: those listed.
        group: the group that ``Join`` was given; ``...`` if none was.
        enable: whether the block does anything.

    Raises:
        ValueError: if they have several, or if none communicates and there are other processes.
    """
    communicating = [joinable for joinable in joinables if joinable.communicates]
    if not communicating:
        if enable and (dist.is_initialized() or os.environ.get("WORLD_SIZE", "1") != "1"):
            names = ", ".join(joinable.join_name for joinable in joinables)
            raise ValueError(
                f"joinables=[{names}] has no object that communicates; list the module wrapped in"
                " DistributedDataParallel (or another Joinable) too [J013]"
            )
        return SingleCollective() if group is ... else collective_of(group)
    first, *others = [joinable for joinable in communicating if joinable.has_own_group] or communicating
    collective = collective_of(first.join_process_group)
    for other in others:
        if collective_of(other.join_process_group) is not collective:
            raise ValueError(
                f"using Join with multiple process groups: that of {first.join_name} is not that of"
                f" {other.join_name}; use a block for each group [J015]"
            )
    if group is not ... and collective_of(group) is not collective:
        raise ValueError(f"process_group={group!r} is not that of {first.join_name}; leave it out [J016]")
    return collective


def check_initialised(joinable: Any) -> None:
    """Raise a ``TypeError`` for what is no ``Joinable``, or whose constructor did not call ``Joinable.__init__``."""
    if not hasattr(joinable, "_join_config"):
        raise TypeError(
            f"joinables has an object that is not initialised; check that the constructor of {type(joinable).__name__}"
            " calls Joinable.__init__(self) [J017]"
        )


def check_keywords(joinables: Sequence[Joinable], kwargs: Mapping[str, Any]) -> None:
    """Raise a ``TypeError`` for a keyword that no hook takes: a mistake, most likely a typo.

    Args:
        joinables: those listed.
        kwargs: what ``Join`` was given beyond its own arguments.
    """
    taken = {"divide_by_initial_world_size"}  # the block itself takes that
    for joinable in joinables:
        keywords = joinable.join_keywords
        if keywords is None:
            parameters = inspect.signature(joinable.join_hook).parameters.values()
            if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
                return
            keywords = frozenset(parameter.name for parameter in parameters)
        taken |= keywords
    for name, value in kwargs.items():
        if name in taken:
            continue
        known = f"they take {', '.join(sorted(taken))}"
        hint = did_you_mean(name, [*taken, *OWN_KEYWORDS])
        #: Leave it out, or mend its name: the text has those that are known.
        raise TypeError(
            f"{name}={value!r}: no join_hook of the listed joinables takes this keyword; {known}{hint} [J018]"
        )


def check_flags(flags: Mapping[str, Any]) -> None:
    """Raise a ``TypeError`` for an argument that is neither true nor false."""
    for name, value in flags.items():
        if value not in (True, False):  # numpy's are fine
            raise TypeError(f"{name}={value!r} must be True or False [J019]")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the known one that it resembles, if there is one."""
    meant = difflib.get_close_matches(name, list(known), n=1)
    return f". Did you mean {meant[0]}?" if meant else ""


def entered_with(joinables: Sequence[Joinable], arguments: Mapping[str, Any], divisor: int) -> list[str]:
    """Return what ranks compare on entering a block: the names of joinables, in order, and the arguments of ``Join``.

    Args:
        joinables: those listed.
        arguments: those that must be the same; only plain values are compared.
        divisor: ``loss_divided_by``.
    """
    settings = {**arguments} if divisor == 1 else {**arguments, "loss_divided_by": divisor}
    plain = [f"{name}={value!r}" for name, value in sorted(settings.items()) if isinstance(value, _SCALARS)]
    return [*(joinable.join_name for joinable in joinables), *plain]
