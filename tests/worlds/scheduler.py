"""Threads and time that a seed decides: :class:`Scheduler` runs one thread at a time, and chooses which one is next.

While a scheduler runs, the modules of ``join`` see :data:`THREADING` and :data:`TIME` in place of ``threading`` and
``time``. Whatever blocks there hands over to another thread. Computing takes no time: the clock moves to the end of the
shortest wait once all threads wait, so that a limit of 30 s passes at once. Where that never ends, the ranks hang.

Threads are real, so that each has its own stack, and are used again by the next program: starting one takes as long as
a whole program.
"""

from __future__ import annotations

import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")
FOREVER = float("inf")
LONGEST = 15.0  # seconds by the clock of a program, several times the longest limit that is in effect
MOST_SWITCHES = 20_000
_LONGEST_NAP = 0.05  # of a thread that polls: it may sleep longer than it asked for


class Killed(BaseException):
    """The program is over, or the process of this thread has ended, and the thread unwinds."""


_OURS = set[int]()
"""The real threads that a scheduler runs. Others may be left of an earlier test, and see real threads and real time."""


class _Worker:
    """A real thread, which runs one job after the other."""

    free: ClassVar[list[_Worker]] = []

    def __init__(self) -> None:
        self.baton = threading.Lock()  # released by whoever lets this thread run
        self.baton.acquire()
        self.job: Callable[[], None]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        _OURS.add(threading.get_ident())
        while True:
            self.baton.acquire()
            self.job()


class Task:
    """A thread, as the scheduler knows it.

    Attributes:
        baton: A real lock, which is released to let the thread run.
        process: The number of its process.
        until: The time at which it ends to wait, if no other thread wakes it up.
        was_woken: Whether one did.
        is_dead: Whether its process has ended.
        naps: How often in a row it has slept.
        locks: The number of locks that it holds; no other thread runs first then.
        thread: Its ``_Thread``.
    """

    def __init__(self, baton: Any, process: int) -> None:
        self.baton, self.process = baton, process
        self.until, self.was_woken, self.is_dead = FOREVER, False, False
        self.naps = self.locks = 0
        self.thread: Any = None


class Scheduler:
    """One run of a function and of all threads that it starts.

    Args:
        seed: What decides between threads that can run.
    """

    current: ClassVar[Scheduler]
    trace: ClassVar[Any] = None
    """What ``sys.settrace`` gets in each thread."""

    def __init__(self, seed: int) -> None:
        self._choose = random.Random(seed).random
        self.now, self.switches = 0.0, 0
        self.ready, self.waiting = list[Task](), list[Task]()
        self.is_over, self.has_hung = False, False
        self.errors = list[BaseException]()
        """What threads have raised."""
        baton = threading.Lock()
        baton.acquire()
        self.running = self._main = Task(baton, 0)
        self._numbers = itertools.count(1)

    def run(self, call: Callable[[], T]) -> T | None:
        """Return the result of a function, once no thread is left.

        Raises:
            RuntimeError: If threads hang and the function does not end by an exception.
        """
        _OURS.add(threading.get_ident())
        Scheduler.current, result = self, None
        try:
            result = call()
        except Killed:
            pass
        finally:
            self.is_over = True
            while self.waiting or self.ready:
                self._hand_over(self._main)
        if self.has_hung:
            raise RuntimeError("the threads hang")
        return result

    def start(self, call: Callable[[], object], process: int) -> Task:
        """Make a thread, which may run from now on."""
        worker = _Worker.free.pop() if _Worker.free else _Worker()
        task = Task(worker.baton, process)

        def job() -> None:
            sys.settrace(self.trace)
            try:
                if not (self.is_over or task.is_dead):
                    call()
            except Killed:
                pass
            except BaseException as error:
                self.errors.append(error)
            _Worker.free.append(worker)
            self._next().baton.release()

        worker.job = job
        self.ready.append(task)
        return task

    # -- waiting ------------------------------------------------------------------------------------------------------

    def wait(self, waiters: list[Task], seconds: float | None) -> bool:
        """Wait until another thread wakes this one up, or so many seconds; return whether it was woken up."""
        task = self.running
        self._check(task)
        if self.is_over:
            return False
        task.until, task.was_woken, task.naps = FOREVER if seconds is None else self.now + seconds, False, 0
        waiters.append(task)
        self.waiting.append(task)
        try:
            self._give_way(task)
        finally:
            if task in waiters:
                waiters.remove(task)
        return task.was_woken

    def sleep(self, seconds: float) -> None:
        """Sleep; a thread that does so again and again sleeps longer and longer, up to the time of a nap."""
        task = self.running
        self._check(task)
        if self.is_over:
            return
        task.naps += 1
        task.until = self.now + max(seconds, min(1e-4 * 2 ** min(task.naps, 10), _LONGEST_NAP))
        self.waiting.append(task)
        self._give_way(task)

    def wake(self, waiters: list[Task]) -> None:
        """Let all threads run that wait here."""
        for task in waiters:
            if not task.is_dead and task in self.waiting:
                task.was_woken = True
                self.waiting.remove(task)
                self.ready.append(task)
        waiters.clear()

    def pause(self) -> None:
        """Let another thread run first, or not."""
        task = self.running
        self._check(task)
        if self.ready and not task.locks and self._choose() < 0.5:
            self.ready.append(task)
            self._give_way(task)

    def begin_process(self) -> None:
        """Let this thread, and the threads that it starts from now on, be a process, which may end by itself."""
        self.running.process = next(self._numbers)

    def end_process(self) -> None:
        """End the process of this thread, as SIGKILL does: none of its threads runs any more."""
        task = self.running
        for other in [*self.ready, *self.waiting]:
            if other.process == task.process and other is not task:
                other.is_dead, other.until = True, FOREVER
                if other in self.ready:
                    self.ready.remove(other)
                    self.waiting.append(other)
        task.is_dead, task.until = True, FOREVER
        self.waiting.append(task)
        self._give_way(task)

    def _check(self, task: Task) -> None:
        if task.is_dead or (self.is_over and task is not self._main):
            raise Killed

    def _give_way(self, task: Task) -> None:
        self._hand_over(task)
        self._check(task)

    def _hand_over(self, task: Task) -> None:
        """Let the next thread run, and return when this one is next."""
        following = self._next()
        if following is not task:
            following.baton.release()
            task.baton.acquire()

    def _next(self) -> Task:
        self.switches += 1
        if not self.is_over and self.switches > MOST_SWITCHES:
            self._hang()
        if self.is_over:
            self.running = self._unwound()
        elif self.ready:
            self.running = self.ready.pop(int(self._choose() * len(self.ready)) if len(self.ready) > 1 else 0)
        else:
            task = min(self.waiting, key=lambda task: task.until)
            if task.until > LONGEST:
                self._hang()
                self.running = self._unwound()
            else:
                self.waiting.remove(task)
                self.now, self.running = max(self.now, task.until), task
        return self.running

    def _hang(self) -> None:
        self.is_over = self.has_hung = True

    def _unwound(self) -> Task:
        """Return a thread that has to end, the main one last."""
        for tasks in (self.ready, self.waiting):
            for task in tasks:
                if task is not self._main:
                    tasks.remove(task)
                    return task
        for tasks in (self.ready, self.waiting):
            if self._main in tasks:
                tasks.remove(self._main)
        return self._main


# -- what modules see in place of threading and time -------------------------------------------------------------------


class _Lock:
    def __init__(self) -> None:
        self._waiters, self._depth = list[Task](), 0
        self._holder: Task | None = None

    _again = False  # whether its holder may acquire it again

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = Scheduler.current
        task = scheduler.running
        if not (self._again and self._holder is task):
            scheduler.pause()
            while self._holder is not None:
                if not blocking or not scheduler.wait(self._waiters, None if timeout < 0 else timeout):
                    return False
            self.hold()
        else:
            self._depth += 1
        return True

    def hold(self) -> None:
        self._holder, self._depth = Scheduler.current.running, 1
        self._holder.locks += 1

    def release(self) -> None:
        self._depth -= 1
        if not self._depth and self._holder is not None:
            self._holder.locks -= 1
            self._holder = None
            Scheduler.current.wake(self._waiters)

    def locked(self) -> bool:
        return self._holder is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()


class _RLock(_Lock):
    _again = True


class _Condition:
    def __init__(self, lock: Any = None) -> None:
        self._lock, self._sleepers = lock or _RLock(), list[Task]()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()

    def wait(self, timeout: float | None = None) -> bool:
        self.release()
        try:
            was_woken = Scheduler.current.wait(self._sleepers, timeout)
        except Killed:
            self._lock.hold()  # which the caller releases
            raise
        self.acquire()
        return was_woken

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        end = None if timeout is None else Scheduler.current.now + timeout
        while not (result := predicate()):
            left = None if end is None else end - Scheduler.current.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify_all(self) -> None:
        Scheduler.current.wake(self._sleepers)

    def notify(self, n: int = 1) -> None:
        self.notify_all()  # waking up without a reason is allowed


class _Event:
    def __init__(self) -> None:
        self._is_set, self._sleepers = False, list[Task]()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        Scheduler.current.wake(self._sleepers)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set and (timeout is None or timeout > 0):
            Scheduler.current.wait(self._sleepers, timeout)
        return self._is_set


class _Thread:
    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] = bool,
        name: str = "",
        args: tuple[Any, ...] = (),
        *,
        daemon: bool | None = None,
    ) -> None:
        self.name, self.daemon, self.ident = name, daemon, None
        self._target, self._args, self._ended = target, args, _Event()
        self._task: Task | None = None

    def start(self) -> None:
        scheduler = Scheduler.current
        self._task = scheduler.start(self._run, scheduler.running.process)
        self._task.thread, self.ident = self, id(self)

    def _run(self) -> None:
        try:
            self._target(*self._args)
        finally:
            self._ended.set()

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def is_alive(self) -> bool:
        return self._task is not None and not self._ended.is_set()


class _Module(ModuleType):
    """A module of the standard library, of which some names are other ones."""

    def __init__(self, module: ModuleType, **names: Any) -> None:
        super().__init__(module.__name__)
        vars(self).update({**vars(module), **names})


def _monotonic() -> float:
    Scheduler.current.now += 1e-6  # so that a loop ends which looks at the clock and does not sleep
    return Scheduler.current.now


def _in_ours(fake: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: (fake if threading.get_ident() in _OURS else real)(*args)


THREADING = _Module(
    threading,
    Lock=_Lock,
    RLock=_RLock,
    Condition=_Condition,
    Event=_Event,
    Thread=_Thread,
    current_thread=_in_ours(lambda: Scheduler.current.running.thread, threading.current_thread),
)
TIME = _Module(
    time,
    monotonic=_in_ours(_monotonic, time.monotonic),
    sleep=_in_ours(lambda seconds: Scheduler.current.sleep(seconds), time.sleep),
)


@contextmanager
def in_place(package: str = "join") -> Iterator[None]:
    """Let the modules of a package see threads and time of the scheduler, for the duration of a context."""
    replaced: dict[Any, ModuleType] = {threading: THREADING, time: TIME}
    undo = list[tuple[ModuleType, str, ModuleType]]()
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == package:
            for key, value in list(vars(module).items()):
                if isinstance(value, ModuleType) and value in replaced:
                    undo.append((module, key, value))
                    setattr(module, key, replaced[value])
    try:
        yield
    finally:
        for module, key, value in undo:
            setattr(module, key, value)
