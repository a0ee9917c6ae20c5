"""A run in the format of Chrome's traces, which ui.perfetto.dev opens: :func:`perfetto_of`.

Each rank is a process with four threads: its steps, its bursts, its waits, and its messages. An arrow leads from the
rank that was waited for to the end of the wait.

Source: "Trace Event Format", the document of the Catapult project.
"""

from __future__ import annotations

from typing import Any

from joinables.commands.parts import Event, Run
from joinables.commands.waits import waits_of

_THREADS = {"steps": ("step", "drained"), "bursts": ("ran", "shadowed", "unfinished"), "waits": ("waited",)}
_THREAD_OF = {kind: at for at, kinds in enumerate(_THREADS.values()) for kind in kinds}
_MESSAGES = len(_THREADS)
_SHORTEST = 1.0  # microseconds: what has no length could not be seen


def perfetto_of(run: Run) -> dict[str, Any]:
    """The file's content: ``traceEvents`` sorted by time, in microseconds."""
    about: list[dict[str, Any]] = []
    for rank, part in run.parts.items():
        name = f"rank {rank} ({part.host}, process {part.process})"
        about += [_about("process_name", rank, 0, name=name), _about("process_sort_index", rank, 0, sort_index=rank)]
        about += [_about("thread_name", rank, at, name=each) for at, each in enumerate([*_THREADS, "messages"])]
    events = [_slice(rank, event) for rank, part in run.parts.items() for event in part.events]
    for number, wait in enumerate(waits_of(run).all):
        flow = {"cat": "wait", "name": f"rank {wait.rank} waits for rank {wait.on}", "id": number}
        thread = _MESSAGES if wait.event.kind == "waited" else _THREAD_OF["ran"]
        events.append({**flow, "ph": "s", "pid": wait.on, "tid": thread, "ts": _micro(wait.came)})
        waiting = {"pid": wait.rank, "tid": _THREAD_OF[wait.event.kind], "ts": _micro(wait.event.end)}
        events.append({**flow, "ph": "f", "bp": "e", **waiting})
    events.sort(key=lambda event: event["ts"])
    return {"traceEvents": about + events, "displayTimeUnit": "ms"}


def _micro(seconds: float) -> float:
    return round(1e6 * seconds, 3)


def _about(what: str, rank: int, thread: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "ts": 0, "args": arguments}


def _slice(rank: int, event: Event) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": event.kind,
        "name": f"{event.kind}: {event.what}" if event.what else event.kind,
        "pid": rank,
        "tid": _THREAD_OF.get(event.kind, _MESSAGES),
        "ts": _micro(event.begin),
        "dur": max(_micro(event.end - event.begin), _SHORTEST),
        "args": {} if event.number is None else {"number": event.number},
    }
