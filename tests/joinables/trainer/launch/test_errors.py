"""Errors of a launch say who and what, and can be pickled themselves: a launch may be inside another one."""

from __future__ import annotations

import pickle

import pytest

from joinables.trainer.launch.errors import LaunchError, NotPicklable, RemoteTraceback, WorkerDied, WorkerRaised


@pytest.mark.parametrize(
    ("error", "text", "signal"),
    [
        (WorkerDied(2, -9), "rank 2 was killed by SIGKILL [J214]", "SIGKILL"),
        (WorkerDied(2, -40), "rank 2 was killed by signal 40 [J214]", "signal 40"),
        (WorkerDied(1, 3), "rank 1 exited with code 3 before it returned a result [J215]", None),
        (WorkerDied(1, 3, hint="Eat."), "rank 1 exited with code 3 before it returned a result [J215]. Eat.", None),
        (WorkerDied(1, 3, returned=True), "rank 1 exited with code 3 after fn had returned [J215]", None),
    ],
)
def test_worker_died(error: WorkerDied, text: str, signal: str | None) -> None:
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert str(each) == text
        assert each.signal == signal
        assert (each.rank, each.exit_code) == (error.rank, error.exit_code)


def test_errors_form_one_family() -> None:
    for cls in (WorkerDied, WorkerRaised, NotPicklable):
        assert issubclass(cls, LaunchError)
        assert cls.__doc__
    assert issubclass(LaunchError, RuntimeError)
    assert not issubclass(RemoteTraceback, LaunchError)
    assert "line 3" in str(pickle.loads(pickle.dumps(RemoteTraceback("line 3"))))
