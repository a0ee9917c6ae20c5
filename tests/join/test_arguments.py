"""Mistakes are told before any collective, with the argument, the value and the way out."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from join import (
    Join,
    Joinable,
    JoinError,
    JoinHook,
    JoinTimeoutError,
    ProtocolError,
    register_joinable,
)
from join.collectives import SingleCollective, ThreadCollective, collective_of, run_threads
from join.collectives.version import VERSION
from tests.join.counter import Counter


def alone(fn: Any) -> None:
    run_threads(1, fn)


def test_empty_list() -> None:
    with pytest.raises(ValueError, match=r"Join\(\[\]\) requires at least one joinable"):
        Join([])


def test_a_list_of_nothing_and_no_loop() -> None:
    @alone
    def _(collective: ThreadCollective) -> None:
        told = r"A block that lists nothing is meant for loops over join.iterate"
        with pytest.warns(UserWarning, match=told), Join([], process_group=collective):
            pass


def test_a_group_that_is_not_that_of_what_is_listed() -> None:
    @alone
    def _(collective: ThreadCollective) -> None:
        Join([Counter(collective)], process_group=collective)
        with pytest.raises(ValueError, match=r"process_group=.* is not the process group of Counter\. Remove"):
            Join([Counter(collective)], process_group=SingleCollective())


@pytest.mark.parametrize(("divisor", "error"), [(0, ValueError), (-2, ValueError), (1.5, TypeError), (True, TypeError)])
def test_a_divisor_of_losses_that_is_none(divisor: Any, error: type[Exception]) -> None:
    @alone
    def _(collective: ThreadCollective) -> None:
        with pytest.raises(error, match=rf"loss_divided_by={divisor}"):
            Join([Counter(collective)], loss_divided_by=divisor)


def test_object_that_cannot_join() -> None:
    with pytest.raises(TypeError, match=r"An object of type dict cannot join.*register_joinable\(dict"):
        Join([{}])


def test_only_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ValueError, match=r"Join\(\[SGD\]\) lists no object that communicates"):
        Join([optimizer])


@pytest.mark.parametrize(("enable", "world_size"), [(True, "1"), (False, "1"), (False, "2")])
def test_only_state_where_there_is_nothing_to_join(
    monkeypatch: pytest.MonkeyPatch, enable: bool, world_size: str
) -> None:
    """One process, or a block that is not enabled: it does nothing, and a loop in it has its windows and weights."""
    monkeypatch.setenv("WORLD_SIZE", world_size)
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    join = Join([net, optimizer], enable=enable, divide_by_initial_world_size=False)
    for _ in range(2):
        with join:
            data = [torch.ones(1, 1), torch.ones(3, 1)]
            found = [(len(x), join.weight, join.ends_window) for x in join.iterate(data, weigh=len, window=2)]
            assert not Join.is_open_on(None)
        assert found == [(1, 1.0, False), (3, 3.0, True)]


def test_same_object_twice() -> None:
    @alone
    def _(collective: ThreadCollective) -> None:
        counter = Counter(collective)
        with pytest.raises(ValueError, match=r"joinables\[0\] and joinables\[2\] are the same Counter"):
            Join([counter, Counter(collective), counter])


def test_two_groups() -> None:
    one: list[Any] = []
    run_threads(1, one.append)
    run_threads(1, one.append)
    names = r"Counter \(joinables\[0\]\) and Counter \(joinables\[1\]\)"
    with pytest.raises(ValueError, match=rf"{names} use multiple process groups in one Join block\. List only"):
        Join([Counter(one[0]), Counter(one[1])])


@pytest.mark.parametrize("enable", [True, False])
def test_entering_one_that_is_open(enable: bool) -> None:
    @alone
    def _(collective: ThreadCollective) -> None:
        counter = Counter(collective)
        join = Join([counter], enable=enable)
        with join:
            counter()
            with pytest.raises(JoinError, match="This Join is open already"):
                join.__enter__()
            counter()
        assert counter.total == 2


def test_inside_two_blocks() -> None:
    @alone
    def _(collective: ThreadCollective) -> None:
        counter = Counter(collective)
        with Join([counter]), pytest.raises(JoinError, match="Counter is inside another Join block"):
            Join([counter]).__enter__()
        with Join([counter]):
            counter()


def test_constructor_that_forgets_joinable() -> None:
    class Forgetful(Counter):
        def __init__(self, group: Any) -> None:
            self.group = group

    @alone
    def _(collective: ThreadCollective) -> None:
        for call in (lambda: Join([Forgetful(collective)]), lambda: Join.notify_join_context(Forgetful(collective))):
            with pytest.raises(TypeError, match=r"An object of type Forgetful is not an initialised Joinable\."):
                call()


def test_notify_of_what_is_no_joinable() -> None:
    with pytest.raises(TypeError, match=r"An object of type str is not an initialised Joinable\."):
        Join.notify_join_context("counter")


def test_keyword_that_nobody_takes() -> None:
    class Strict(Counter):
        def join_hook(self, *, rate: float = 1.0) -> JoinHook:  # type: ignore[override]
            return super().join_hook(rate=rate)

    @alone
    def _(collective: ThreadCollective) -> None:
        with pytest.raises(
            TypeError,
            match=r"rte=2 is not a keyword of Join or of a listed object\. .* accept divide_by_.*, rate\.",
        ):
            Join([Strict(collective)], rte=2)
        strict = Strict(collective)
        with Join([strict], rate=2.0):
            pass
        assert strict.keywords == {"rate": 2.0}


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf")])
def test_timeout_out_of_range(timeout: float) -> None:
    @alone
    def _(collective: ThreadCollective) -> None:
        with pytest.raises(ValueError, match="timeout="):
            Join([Counter(collective)], timeout=timeout)


@pytest.mark.parametrize("name", ["enable", "throw_on_early_termination", "divide_by_initial_world_size"])
def test_flags_that_are_none(name: str) -> None:
    flag: Any = {name: "no"}

    @alone
    def _(collective: ThreadCollective) -> None:
        with pytest.raises(TypeError, match=f"{name}='no' is not True or False"):
            Join([Counter(collective)], **flag)


def test_group_of_the_wrong_kind() -> None:
    with pytest.raises(TypeError, match="neither a ProcessGroup nor"):
        collective_of("gloo")
    with pytest.raises(ValueError, match="not initialised"):
        collective_of(None)


def test_registered_class_joins() -> None:
    class Thing:
        def __init__(self, group: Any) -> None:
            self.group = group

    class Special(Thing):
        pass

    register_joinable(Thing, lambda thing: Counter(thing.group))

    @alone
    def _(collective: ThreadCollective) -> None:
        with Join([Special(collective)]) as join:
            pass
        assert len(join.report.ranks) == 1


def test_joinable_needs_no_cooperation_from_module() -> None:
    class Net(torch.nn.Module, Joinable):
        def __init__(self, group: Any) -> None:
            Joinable.__init__(self)
            torch.nn.Module.__init__(self)
            self.group = group
            self.layer = torch.nn.Linear(1, 1)

        def join_hook(self, **kwargs: Any) -> JoinHook:
            return JoinHook()

        @property
        def join_device(self) -> torch.device:
            return torch.device("cpu")

        @property
        def join_process_group(self) -> Any:
            return self.group

    @alone
    def _(collective: ThreadCollective) -> None:
        net = Net(collective)
        with Join([net]):
            assert Join.notify_join_context(net) is not None


@pytest.mark.parametrize("joinables", [torch.nn.Sequential(torch.nn.Linear(1, 1)), "model", 3])
def test_what_is_no_list(joinables: Any) -> None:
    with pytest.raises(TypeError, match=r"not a list\. Write Join\(\[...\]\)\."):
        Join(joinables)


@pytest.mark.parametrize("timeout", ["60", True])
def test_timeout_that_is_no_number(timeout: Any) -> None:
    @alone
    def _(collective: ThreadCollective) -> None:
        with pytest.raises(TypeError, match=f"timeout={timeout!r} is not a number"):
            Join([Counter(collective)], timeout=timeout)


def test_typo_of_a_keyword_of_join() -> None:
    class Strict(Counter):
        def join_hook(self) -> JoinHook:  # type: ignore[override]
            return super().join_hook()

    @alone
    def _(collective: ThreadCollective) -> None:
        with pytest.raises(TypeError, match=r"accept divide_by_initial_world_size\. Did you mean timeout"):
            Join([Strict(collective)], time_out=2)


def test_notify_of_one_that_the_block_does_not_list() -> None:
    @alone
    def _(collective: ThreadCollective) -> None:
        listed, other = Counter(collective), Counter(collective)
        with pytest.raises(JoinError, match="inside a Join block that does not list it"), Join([listed]):
            other()


def test_adapter_that_returns_something_else() -> None:
    class Thing:
        pass

    for wrong in (None, [], [Thing()], "Thing"):
        register_joinable(Thing, lambda thing, wrong=wrong: wrong)  # type: ignore[misc]
        with pytest.raises(TypeError, match=r"adapter registered for .*Thing returned"):
            Join([Thing()])


def test_ranks_that_list_different_things() -> None:
    class Other(Counter):
        pass

    def enter(collective: ThreadCollective) -> str:
        kind = Other if collective.rank == 1 else Counter
        with pytest.raises(ProtocolError) as caught, Join([kind(collective)]):
            raise AssertionError("not reached")
        with Join([Counter(collective)]):  # the group is in step
            pass
        return str(caught.value)

    for text in run_threads(3, enter):
        assert "Join with different objects or arguments (ranks [0, 2]: Counter; ranks [1]: Other). Pass" in text


def test_ranks_with_different_arguments() -> None:
    def enter(collective: ThreadCollective) -> None:
        told = r"entered Join with different.*\(ranks \[0\]: timeout=None; ranks \[1\]: timeout=5\.0\)\. "
        with pytest.raises(ProtocolError, match=told):
            Join([Counter(collective)], timeout=5 if collective.rank else None).__enter__()

    run_threads(2, enter)


@pytest.mark.parametrize(
    ("listed", "told"),
    [
        (
            ["ab", "ba"],
            f"ranks [0]: A, B, throw_on_early_termination=False, timeout=None, joinables {VERSION}; ranks [1]: B, A, ",
        ),
        (["aab", "ab"], "ranks [0]: A; ranks [1]: nothing more"),
        (["a", "ab"], "ranks [0]: nothing more; ranks [1]: B"),
    ],
)
def test_ranks_that_list_the_same_otherwise(listed: list[str], told: str) -> None:
    class Named(Counter):
        join_name = ""  # pyright: ignore[reportAssignmentType]

    def enter(collective: ThreadCollective) -> None:
        counters = [Named(collective) for _ in listed[collective.rank]]
        for counter, name in zip(counters, listed[collective.rank], strict=True):
            counter.join_name = name.upper()  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(ProtocolError, match=re.escape(f"({told}")):
            Join(counters).__enter__()

    run_threads(2, enter)


def test_rank_that_does_not_enter() -> None:
    def enter(collective: ThreadCollective) -> None:
        if collective.rank == 0:
            with pytest.raises(JoinTimeoutError, match=r"Ranks \[1\].*rank 0 entered Join with Counter,"):
                Join([Counter(collective)], timeout=0.2).__enter__()
            collective._world.store.set("done", "")
        else:
            collective._world.store.get("done")  # it is there, and does something else

    run_threads(2, enter)


def test_join_hook_that_returns_nothing() -> None:
    class Forgetful(Counter):
        def join_hook(self, **kwargs: Any) -> Any:
            pass

    def body(collective: ThreadCollective) -> None:
        with pytest.raises(TypeError, match=r"join_hook of Forgetful returned None\. Return a JoinHook"):
            Join([Forgetful(collective)]).__enter__()
        with Join([Counter(collective)]):
            pass

    alone(body)


def test_a_typo_of_weight() -> None:
    @alone
    def _(collective: ThreadCollective) -> None:
        with Join([Counter(collective)]) as join:
            with pytest.raises(AttributeError, match=r"no attribute 'weigth' that can be set"):
                join.weigth = 3  # type: ignore[attr-defined]
            join.weight = torch.tensor(3)  # pyright: ignore[reportAttributeAccessIssue]
            assert join.weight == 3.0
