"""State without collectives in the loop: :class:`OptimizerState` for optimizers, and :class:`State` for other objects.

Nothing is sent in the loop. If ranks have shadowed others in a block, their state is stale at its end. An optimizer's
state is then copied in place::

    last joiner                                   other ranks
    -----------                                   -----------
    its state, in the one copy of all state       into their own tensors, if these fit
    (``join.transfer.copy_state``)

Other ranks that were active until the end take part and keep their own state. LR schedulers, GradScalers, EMA copies,
and other objects with ``state_dict`` and ``load_state_dict`` load the state of the last joiner, which is part of the
same copy.

If no rank has shadowed others, the block compares the values of parameter groups, the step counts, and the states of
schedulers and scalers (``join.agreement``). Tensors of an EMA copy that correspond to buffers are copied, because each
rank has its own buffers.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from numbers import Integral, Real
from typing import Any, cast
from weakref import WeakSet

import torch
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from join import Join, Joinable, JoinError
from join.agreement import differences
from join.collectives._torch_private import pytree
from join.errors import described
from join.held import PLAIN, UNFIT, Part
from join.step_hook import before_step
from join.transfer import Exchange, Packed, Unfit, broadcast_tensors, numbered, pack, unpack, why_unlike
from joinables._torch import autograd
from joinables._torch.reducer import parameters_of_each_rank
from joinables.adapter import Adapter, Silent
from joinables.attributes import parts_of_module, parts_of_optimizer
from joinables.sample import sampled

STEPS_IN_LOOPS = "number of steps made on gradients in loops over join.iterate"
"""Name of a value that is equal on all ranks: a rank that has skipped a backward has stepped without gradients."""


class Steps(Adapter):
    """Base class of the adapters of optimizers: checks and counts of steps, and values that are equal on all ranks."""

    _target: torch.optim.Optimizer

    @override
    def attach(self, join: Join) -> None:
        super().attach(join)
        self._steps_in_loops, self._rates = 0, array("d")
        self.own_rates = self._rates
        targets = [joinable.join_target for joinable in self._channel.roster.listed]
        modules = [target for target in targets if isinstance(target, DistributedDataParallel)]
        self._ignored = {id(parameter) for module in modules for parameter in parameters_of_each_rank(module)}
        """The ids of parameters that a listed DDP module ignores, so that each rank has its own."""
        self._handles = [self._target.register_step_pre_hook(self._before_step)]

    @override
    def before_entering(self, listed: Sequence[Joinable]) -> Mapping[str, Any]:
        return group_values(self._target.param_groups, on_cpu=True)

    @override
    def equal_values(self) -> Mapping[str, Any]:
        return {**group_values(self._target.param_groups), STEPS_IN_LOOPS: self._steps_in_loops}

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Check, announce and count a step."""
        channel, step = self._channel, self._channel.place.step
        is_scaled = step.in_loop and channel.scaling.in_use
        if channel.roster.backwards and not is_scaled and autograd.backward_under_way() != -1:
            raise JoinError(
                f"{self.join_name} stepped inside a backward, but Join multiplies the gradients of"
                " DistributedDataParallel at its end. Step the optimizer after the backward, or loop over join.iterate"
                " and call join.scale(loss).backward(). [J537]"
            )
        if step.in_loop and (channel.scaling.is_due or not step.ends_window):
            channel.scaling.refuse_step(self, step)
        if self.communicates:
            self._announce_step(args, kwargs)
        if not step.in_loop:
            self._rates.append(rate_of(self._target.param_groups))
            return
        for group in self._target.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) not in self._ignored:  # the step changes something
                    self._steps_in_loops += 1
                    return

    def _announce_step(self, args: Any, kwargs: Any) -> None:
        """Announce a step of an optimizer that communicates, which is then counted.

        A rank that skipped a backward on a dummy may receive its result here.
        """
        raise NotImplementedError


class OptimizerState(Steps, Silent):
    """Adapter that copies an optimizer's state in place, when the block ends, to the ranks that ran out of data early.

    Args:
        target: The optimizer.
    """

    own_steps = property(lambda self: len(self._rates))  # pyright: ignore[reportAssignmentType]

    # -- comparing ----------------------------------------------------------------------------------------------------

    @override
    def held(self) -> Iterable[Part]:
        return parts_of_optimizer(self._target, self.join_name, parameters_of(self._target))

    @override
    def equal_values(self) -> Mapping[str, Any]:
        values = dict(super().equal_values())
        counts: dict[torch.device, dict[str, torch.Tensor]] = {}  # by the device, and the name of the value
        for index, state in self._states(parameters_of(self._target)).items():
            name, count = f"step count of parameter {index}", state.get("step") if hasattr(state, "get") else None
            if isinstance(count, torch.Tensor) and count.numel() == 1:
                counts.setdefault(count.device, {})[name] = count.detach().reshape(()).double()
            elif isinstance(count, (int, float)):
                values[name] = float(count)
        for on_device in counts.values():  # one host synchronisation for each device
            values |= zip(on_device, cast("list[float]", torch.stack([*on_device.values()]).tolist()), strict=True)
        return values

    # -- copying ------------------------------------------------------------------------------------------------------

    @override
    def exchange(self, source: int) -> Exchange:
        groups, parameters = self._target.param_groups, parameters_of(self._target)
        shapes = str([[tuple(parameter.shape) for parameter in group["params"]] for group in groups])
        values = {("group", index): group for index, group in enumerate(without_params(groups))}
        entries: dict[Any, Any] = {**values, **self._states(parameters)}
        why_not, own = why_unlike(*parameters), dict[Any, Packed]()
        try:
            known = numbered(parameters)
            own = {key: pack(entry, known, UNFIT) for key, entry in entries.items()}
        except Exception as why:  # of code of the user's
            why_not = str(why) if isinstance(why, Unfit) else described(why)
        equal: Mapping[str, Any] = self.equal_values() if self._collective.rank == source else {}
        inbox = yield {} if why_not else own, shapes, equal, bool(why_not)
        theirs, their_shapes, equal, refused = inbox.skeleton
        if not (why_not or refused):
            if shapes != their_shapes:
                why_not = f"it has parameter groups of shapes {shapes}, but the last rank with data has {their_shapes}"
            elif extra := sorted(own.keys() - theirs.keys(), key=str):
                why_not = f"it has state for parameters {extra} (by index), for which the last rank with data has none"
        if not why_not and inbox.keeps:
            ranks = {source: equal, self._collective.rank: self.equal_values()}
            why_not = differences({rank: [(self.join_name, held)] for rank, held in ranks.items()})
        if self._collective.rank == source or inbox.keeps or why_not or refused:
            yield why_not
            return
        first = next(iter(parameters), None)  # whose device has tensors that this rank has not
        likes = {("group", index): next(iter(group["params"]), first) for index, group in enumerate(groups)}
        for key, (data, tensors) in theirs.items():
            mine = own[key].tensors if key in own else ()
            like = parameters[key] if isinstance(key, int) else likes.get(key, first)
            theirs[key] = Packed(data, inbox.receive(tensors, mine, like))
        yield ""
        for index, group in enumerate(groups):
            values = unpack(theirs.pop(("group", index)), parameters)
            for name in group.keys() - values.keys() - {"params"}:
                del group[name]
            group.update(values)
        for key, packed in theirs.items():
            self._target.state[parameters[key] if isinstance(key, int) else key] = unpack(packed, parameters)

    # -- the parts ----------------------------------------------------------------------------------------------------

    def _states(self, parameters: Sequence[torch.nn.Parameter]) -> dict[Any, Any]:
        """Return the optimizer's state by the index of its parameter in ``parameters``, and other entries by key.

        The parameters that a listed DDP module ignores are each rank's own, and so is their state.
        """
        index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        states: dict[Any, Any] = {}
        held = cast("dict[Any, Any]", self._target.state)
        for key, state in held.items():
            if not isinstance(key, torch.Tensor):
                states[key] = state
            elif id(key) in index_of and id(key) not in self._ignored:
                states[index_of[id(key)]] = state
        return states


class Loaded(Silent):
    """Adapter that copies an object's state, when the block ends, to the ranks that ran out of data early.

    Args:
        target: The object, with ``state_dict`` and ``load_state_dict``.
    """

    @override
    def exchange(self, source: int) -> Exchange:
        state, why_not = None, ""
        try:
            state = self._target.state_dict()  # on other ranks, its tensors receive the state
            why_not = why_unlike(*[leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, torch.Tensor)])
        except Exception as failure:
            why_not = f"it has no state: {described(failure)}"
        inbox = yield None if why_not else state
        received = inbox.fill(inbox.skeleton, state)
        yield why_not if self._collective.rank == source else ""
        if self._collective.rank != source:
            self._target.load_state_dict(received)


class SchedulerState(Loaded):
    """Adapter of a scheduler or a ``GradScaler``, whose state is equal on all ranks after equal steps."""

    @override
    def before_entering(self, listed: Sequence[Joinable]) -> Mapping[str, Any]:
        scaler = self._target
        if not isinstance(scaler, torch.amp.GradScaler):
            return plain_values(scaler.state_dict(), on_cpu=True)
        numbers = scaler.get_growth_factor, scaler.get_backoff_factor, scaler.get_growth_interval
        return {number.__name__.removeprefix("get_"): number() for number in numbers if scaler.is_enabled()}

    @override
    def equal_values(self) -> Mapping[str, Any]:
        return plain_values(self._target.state_dict())


class State(Loaded):
    """Adapter of an object whose state may differ between ranks, such as an EMA copy or a wrapper of optimizers."""

    @override
    def held(self) -> Iterable[Part]:
        if parameters := parameters_of(self._target):
            return parts_of_optimizer(self._target, self.join_name, parameters)
        state: Any = {}
        with suppress(Exception):  # the copy says why it has no state
            state = self._target.state_dict()
        values = {path: leaf for path, _, leaf in leaves_of(state) if type(leaf) in PLAIN}
        tensors = sampled(self._tensors(state, self._shapes_of_buffers())[1], "state")
        return Part(self.join_name, values, None), Part(self.join_name, tensors, None, is_required=True)

    @override
    def before_entering(self, listed: Sequence[Joinable]) -> Mapping[str, Any]:
        return group_values(groups_of(self._target), on_cpu=True)

    @override
    def synchronise_own(self, source: int) -> None:
        if shapes := self._shapes_of_buffers():
            state = self._target.state_dict()
            matching, _ = self._tensors(state, shapes)
            if matching:
                broadcast_tensors(self._collective, matching, source)
                self._target.load_state_dict(state)  # in case state_dict returned copies

    def _shapes_of_buffers(self) -> dict[str, torch.Size]:
        """Return the shapes of the buffers of all listed modules, and of wrapped modules, by name."""
        targets = [joinable.join_target for joinable in self._channel.roster.listed]
        modules = [target for target in targets if isinstance(target, torch.nn.Module)]
        inside = [getattr(module, "module", None) for module in modules]
        modules += [module for module in inside if isinstance(module, torch.nn.Module)]
        return {name: buffer.shape for module in modules for name, buffer in module.named_buffers()}

    @staticmethod
    def _tensors(state: Any, shapes: Mapping[Any, torch.Size]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the tensors that match buffers by name and shape, which each rank has for itself, and the others."""
        matching, others = list[torch.Tensor](), list[torch.Tensor]()
        for _, name, leaf in leaves_of(state):
            if isinstance(leaf, torch.Tensor):
                is_own = not why_unlike(leaf) and shapes.get(name) == leaf.shape
                (matching if is_own else others).append(leaf)
        return matching, others


class ModuleState(Loaded):
    """Adapter of a module that is not trained, such as an EMA copy, or that another listed module contains."""

    _unreduced: Set[int] = frozenset[int]()
    """The ids of its parameters that no listed object reduces."""

    @override
    def before_entering(self, listed: Sequence[Joinable]) -> Mapping[str, Any]:
        """Refuse a module that a listed optimizer trains, if no listed object can reduce its gradients."""
        # ZeRO's step communicates, but does not reduce gradients. A joinable of the user may reduce any gradients.
        reducers = [each for each in listed if each.communicates and type(each).__module__ != "joinables.zero"]
        if not (listed and all(isinstance(each.join_target, torch.nn.Module) for each in reducers)):
            return {}
        reduced = {id(parameter) for each in reducers for parameter in each.join_target.parameters()}
        self._unreduced = {id(p) for p in self._target.parameters() if p.requires_grad} - reduced
        for each in listed:
            self._refuse_if_trained_by(each.join_target, each.join_name)
        return {}

    @override
    def held(self) -> Iterable[Part]:
        yield Part(self.join_name, sampled(list(self._target.parameters())), None, is_required=True)
        yield from parts_of_module(self._target, self.join_name)

    @override
    def attach(self, join: Join) -> None:
        super().attach(join)
        self._others = WeakSet[torch.optim.Optimizer]()  # that train other modules
        if self._unreduced:
            self._handles = [before_step.add(self._check_step)]

    def _check_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Refuse a step of an optimizer that is not listed, and trains this module."""
        if optimizer not in self._others:
            self._refuse_if_trained_by(optimizer, type(optimizer).__name__)
            self._others.add(optimizer)

    def _refuse_if_trained_by(self, optimizer: Any, name: str) -> None:
        if not self._unreduced.isdisjoint(map(id, parameters_of(optimizer))):
            raise ValueError(
                f"{name} trains {self.join_name}, but nothing in the list reduces the gradients of this module. List"
                " the DistributedDataParallel module around it. If your loop reduces its gradients, remove it from the"
                " list, loop over join.iterate, and call join.scale(loss). [J546]"
            )

    @override
    def own_tensors(self) -> Sequence[torch.Tensor]:
        return [buffer for buffer in self._target.buffers() if not why_unlike(buffer)]

    @override
    def equal_values(self) -> Mapping[str, Any]:
        return shapes_of(dict(self._target.named_buffers()))


def group_values(groups: Sequence[Mapping[str, Any]], *, on_cpu: bool = False) -> dict[str, Any]:
    """Return the plain values in an optimizer's parameter groups, and the number of groups."""
    values: dict[str, Any] = {"number of parameter groups": len(groups)}
    for index, group in enumerate(without_params(groups)):
        plain = plain_values(group, on_cpu=on_cpu).items()
        values |= {f"value {path} of parameter group {index}": value for path, value in plain}
    return values


def groups_of(obj: Any) -> Sequence[Mapping[str, Any]]:
    """Return the parameter groups of an optimizer, or of a wrapper of one; none for another object."""
    groups: Any = getattr(obj, "param_groups", ())
    return () if callable(groups) else groups  # a method of another object may have this name


def parameters_of(obj: Any) -> list[torch.nn.Parameter]:
    """Return the parameters in all groups of an optimizer; an empty list for an object without groups."""
    return [parameter for group in groups_of(obj) for parameter in group["params"]]


def without_params(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return an optimizer's parameter groups without parameters, with names in an order that is equal on all ranks."""
    return [{name: group[name] for name in sorted(group.keys() - {"params"})} for group in groups]


def shapes_of(buffers: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
    """Return the shapes of a module's buffers, which are equal on all ranks, as values to compare."""
    return {f"shape of buffer {name}": list(buffer.shape) for name, buffer in buffers.items()}


def leaves_of(tree: Any, path: str = "", last: Any = None) -> Iterator[tuple[str, Any, Any]]:
    """Yield the leaves of nested dicts, lists, tuples and deques, as ``(path, last key of the path, leaf)``.

    A path is a text, as ``['betas'][0]``. This is faster than torch's function.
    """
    if isinstance(tree, (dict, list, tuple, deque)):
        keyed = cast("dict[Any, Any]", tree).items() if isinstance(tree, dict) else enumerate(cast("list[Any]", tree))
        for key, each in keyed:
            yield from leaves_of(each, f"{path}[{key!r}]", key)
    else:
        yield path, last, tree


def plain_values(tree: Any, *, on_cpu: bool = False) -> dict[str, Any]:
    """Return the numbers, texts and one-element tensors of nested containers, by path. Other leaves are skipped.

    Args:
        tree: The containers.
        on_cpu: Whether to skip tensors on other devices, for which the host would wait.
    """
    values: dict[str, Any] = {}
    for path, _, leaf in leaves_of(tree):
        is_read = isinstance(leaf, torch.Tensor) and leaf.numel() == 1 and (leaf.is_cpu or not on_cpu)
        value = leaf.item() if is_read else leaf
        if type(value) not in PLAIN and isinstance(value, Real) and not isinstance(value, Integral):
            value = float(cast("float", value))  # a number of numpy
        if value is not None and (type(value) in PLAIN or isinstance(value, (Integral, complex, str))):
            values[path] = value
    return values


def rate_of(groups: Sequence[Mapping[str, Any]]) -> float:
    """Return the learning rate, as the sum over groups; 0 if reading it would make the host wait for a device."""
    total = 0.0
    for group in groups:
        rate = group.get("lr", 0.0)
        if not isinstance(rate, torch.Tensor) or rate.is_cpu:  # reading it would wait for the device
            total += float(rate)
    return total
