"""Checks of ``Join``'s arguments that need no communication.

:mod:`join.agreement` compares the arguments between ranks.
"""

from __future__ import annotations

import difflib
import inspect
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from numbers import Integral, Real
from typing import Any, cast

import torch
import torch.distributed as dist

from join.collectives import Collective, SingleCollective, collective_of
from join.errors import wrong_kind, wrong_value
from join.joinable import Joinable, JoinHook
from join.registry import joinables_of

_SAMPLES = "the number of samples or tokens in the batch"
_NO_GROUP = " There is no process group yet: call torch.distributed.init_process_group first."
_SCALARS = (bool, int, float, str, type(None))


def checked_number(
    name: str, number: Any, what: str = _SAMPLES, *, least: int = 0, is_whole: bool = False, is_positive: bool = False
) -> float:
    """Return the value of an argument if it is a finite number of at least ``least``.

    Args:
        name: The expression that had this value, for the error text.
        number: A number, or a tensor with one element.
        what: What to pass, for the error text. By default, the argument is a weight.
        least: The least number.
        is_whole: Whether the number is an integer.
        is_positive: Whether the number is larger than ``least``.

    Raises:
        TypeError: If it is not a number, or not a whole one.
        ValueError: If the number is too small, infinite or NaN.
    """
    if isinstance(number, torch.Tensor) and number.numel() == 1:
        number = number.item()
    if isinstance(number, bool) or not isinstance(number, Integral if is_whole else Real):
        raise wrong_kind(name, number, f"a {'whole ' * is_whole}number", what)
    value = float(cast("float", number))
    if not math.isfinite(value) or value < least or (is_positive and value == least):
        raise wrong_value(name, number, f"a finite number {'above' if is_positive else 'of at least'} {least}", what)
    return value


def checked_timeout(timeout: Any) -> float | None:
    """Return ``timeout`` if it is ``None`` or a positive number of seconds; raise as :func:`checked_number` does."""
    seconds = "a number of seconds, or None to wait without limit"
    return None if timeout is None else checked_number("timeout", timeout, seconds, is_positive=True)


def checked_names(names: Any) -> list[str]:
    """Return ``own_attributes`` as a list if it consists of texts.

    Raises:
        TypeError: If it does not.
    """
    found: list[Any] = [...] if isinstance(names, str) or not isinstance(names, Iterable) else [*cast("Any", names)]
    if not all(isinstance(name, str) for name in found):
        raise wrong_kind("own_attributes", cast("Any", names), "a list of names", "names of attributes, as ['seconds']")
    return found


def listed(objects: Any, group: Any) -> list[Any]:
    """Return the objects that ``Join`` was called with as a list.

    Args:
        objects: The first argument of ``Join``.
        group: The argument ``process_group``; ``...`` if it was not passed.

    Raises:
        TypeError: If ``objects`` is a module, a string, or cannot be iterated.
        ValueError: If ``objects`` is empty and no process group was passed.
    """
    # A Sequential or a ModuleList can be iterated. Without this check, Join would treat it as a list of layers.
    if isinstance(objects, (torch.nn.Module, str)) or not isinstance(objects, Iterable):
        raise TypeError(f"joinables is of type {type(objects).__name__}, not a list. Write Join([...]). [J010]")
    objects = list(cast("Iterable[Any]", objects))
    if all(obj is None for obj in objects) and group is ...:
        raise ValueError(
            "Join([]) requires at least one joinable. List the objects that you train. For a loop over join.iterate"
            " that trains nothing, write Join([], process_group=None), or pass the process group of the loop. [J011]"
        )
    return objects


def expand(objects: Sequence[Any]) -> list[Joinable]:
    """Return the joinables for the objects that ``Join`` was called with.

    ``None`` is skipped. Objects with the same name are told apart in errors by their positions.

    Raises:
        TypeError: If an object cannot join.
        ValueError: If an object is listed twice.
    """
    expanded: list[Joinable] = []
    seen: dict[int, int] = {}
    for position, obj in enumerate(objects):
        joinables = [] if obj is None else joinables_of(obj)
        for joinable in joinables:
            check_initialised(joinable)
            object.__setattr__(joinable, "join_place", "")
        for target in {id(joinable.join_target): joinable.join_target for joinable in joinables}.values():
            if id(target) in seen:
                raise ValueError(
                    f"joinables[{seen[id(target)]}] and joinables[{position}] are the same {type(target).__name__}."
                    " List it once. [J012]"
                )
            seen[id(target)] = position
        expanded += joinables
    names = Counter(name for name, _ in {(each.join_name, id(each.join_target)) for each in expanded})
    for joinable in expanded:
        if names[joinable.join_name] > 1:
            object.__setattr__(joinable, "join_place", f" (joinables[{seen[id(joinable.join_target)]}])")
    return expanded


def hook_of(joinable: Joinable, kwargs: Mapping[str, Any]) -> JoinHook:
    """Return the hook of a joinable for one block.

    Raises:
        TypeError: If ``join_hook`` returned something else.
    """
    hook: Any = joinable.join_hook(**kwargs)
    if callable(getattr(hook, "main_hook", None)) and callable(getattr(hook, "post_hook", None)):
        return hook
    raise TypeError(f"join_hook of {joinable.join_name} returned {hook!r}. Return a JoinHook from it. [J014]")


def common_collective(joinables: Sequence[Joinable], group: Any, *, enable: bool) -> Collective:
    """Return the collective of the joinables' process group.

    If nothing has to communicate, it is a collective of this process alone.

    Args:
        joinables: The listed joinables.
        group: The argument ``process_group`` of ``Join``; ``...`` if it was not passed.
        enable: Whether the block does anything.

    Raises:
        ValueError: If the joinables have several process groups, or if none communicates and there are other processes.
    """
    communicating = [joinable for joinable in joinables if joinable.communicates]
    if not communicating:
        collective = SingleCollective() if group is ... or is_alone(group) else collective_of(group)
        if enable and (collective.world_size > 1 or not is_alone(None)):
            names = ", ".join(joinable.join_name for joinable in joinables)
            hint = "" if dist.is_initialized() else _NO_GROUP
            raise ValueError(
                f"Join([{names}]) lists no object that communicates.{hint} Add the DistributedDataParallel module, or"
                " another Joinable, to the list. If the loop reduces gradients itself, write Join([],"
                " process_group=None), or with the collective of another library, and loop over join.iterate. [J013]"
            )
        return collective
    first, *others = [joinable for joinable in communicating if joinable.has_own_group] or communicating
    collective = collective_of(first.join_process_group)
    for other in others:
        if collective_of(other.join_process_group) is not collective:
            #: If no listed object is on that group, pass an empty list and the group. The ranks of smaller groups then
            #: need no block, because all ranks run the loop body.
            raise ValueError(
                f"{first.join_name} and {other.join_name} use multiple process groups in one Join block. List only the"
                " objects on the group of all ranks, loop over join.iterate, and call join.scale(loss). [J015]"
            )
    if group is not ... and collective_of(group) is not collective:
        raise ValueError(
            f"process_group={group!r} is not the process group of {first.join_name}. Remove process_group from"
            " Join(...). If another library reduces the gradients, write Join([], process_group=collective), loop over"
            " join.iterate, and call join.scale(loss). [J016]"
        )
    return collective


def is_alone(group: Any) -> bool:
    """Return whether ``group`` is the default process group, and there is none because this process is the only one."""
    sizes = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "HOROVOD_SIZE"))
    return group is None and not dist.is_initialized() and all(size == "1" for size in sizes)


def collective_to_tell(objects: Sequence[Any], group: Any) -> Collective | None:
    """Return the collective of the ranks that wait for this one if it cannot build or enter a ``Join``.

    Args:
        objects: The first argument of ``Join``, as far as it is known.
        group: The argument ``process_group`` of ``Join``; ``...`` if it was not passed.

    Returns:
        The collective of the process group, of the first object that has one, or of the default group. ``None`` if
        there is no process group.
    """
    with suppress(Exception):
        if group is not ...:
            return collective_of(group)
    for obj in objects:
        with suppress(Exception):  # this object may be the cause of the failure
            for joinable in joinables_of(obj):
                if joinable.communicates:
                    return collective_of(joinable.join_process_group)
    return collective_of(None) if dist.is_initialized() else None


def check_initialised(joinable: Any) -> None:
    """Check that an object is a ``Joinable`` whose constructor called ``Joinable.__init__``.

    Raises:
        TypeError: If it is not.
    """
    if not hasattr(joinable, "_join_config"):
        raise TypeError(
            f"An object of type {type(joinable).__name__} is not an initialised Joinable. Derive its class"
            " from Joinable, and call Joinable.__init__(self) in its constructor. [J017]"
        )


def check_keywords(joinables: Sequence[Joinable], kwargs: Mapping[str, Any], own: Iterable[str]) -> None:
    """Check that a hook accepts each extra keyword of ``Join``. An unknown keyword is most likely a typo.

    Args:
        joinables: The listed joinables.
        kwargs: The keywords that ``Join`` does not use itself.
        own: The names of those that it uses.

    Raises:
        TypeError: If no hook accepts a keyword.
    """
    accepted = {"divide_by_initial_world_size"}  # the block itself uses it
    for joinable in joinables:
        keywords = joinable.join_keywords
        if keywords is None:
            parameters = inspect.signature(joinable.join_hook).parameters.values()
            if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
                return
            keywords = frozenset(parameter.name for parameter in parameters)
        accepted |= keywords
    for name, value in kwargs.items():
        if name not in accepted:
            matches = difflib.get_close_matches(name, [*accepted, *own], n=1)
            hint = f" Did you mean {matches[0]}?" if matches else ""
            raise TypeError(
                f"{name}={value!r} is not a keyword of Join or of a listed object. Correct its name, or remove it from"
                f" Join(...). The listed objects accept {', '.join(sorted(accepted))}.{hint} [J018]"
            )


def check_flags(flags: Mapping[str, Any]) -> None:
    """Check that each argument is true or false.

    Raises:
        TypeError: If one is neither.
    """
    for name, value in flags.items():
        if value not in (True, False):  # which a numpy.bool_ is
            raise wrong_kind(name, value, "True or False", "one of them")


def entered_with(joinables: Sequence[Joinable], arguments: Mapping[str, Any]) -> list[str]:
    """Return the values that ranks compare on entering a block.

    These are the names of joinables in order, and ``Join``'s arguments.

    Args:
        joinables: The listed joinables.
        arguments: The arguments that have to be equal on all ranks. Only plain values are compared.
    """
    plain = [f"{name}={value!r}" for name, value in sorted(arguments.items()) if isinstance(value, _SCALARS)]
    return [*(joinable.join_name for joinable in joinables), *plain]
