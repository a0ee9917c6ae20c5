"""Run all small programs, and compare with the verdicts that were kept: ``python -m tests.worlds``."""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict

from tests.worlds.transports import TRANSPORTS
from tests.worlds.verdicts import RIGHT, SIZES, Verdict, Verdicts, changed, judge_all, keep, kept, parts


def shortest(keys: list[tuple[str, str]]) -> str:
    over, program = min(keys, key=lambda key: (len(key[1].replace("*", "")), key[1], key[0]))
    return f"{len(keys)} programs, such as {program or 'one without letters'} over {over}"


def show(verdicts: Verdicts) -> None:
    for over in TRANSPORTS:
        counts = Counter(verdict.kind for (name, _), verdict in verdicts.items() if name == over)
        if counts:
            print(f"{over}: {counts.total()} programs; {', '.join(f'{n} {kind}' for kind, n in counts.most_common())}")
    wrong = defaultdict[Verdict, list[tuple[str, str]]](list)
    for key, verdict in verdicts.items():
        if verdict.kind not in RIGHT:
            wrong[verdict].append(key)
    for verdict, keys in sorted(wrong.items()):
        print(f"  {verdict.kind}: {', '.join(verdict.outcomes)}: {shortest(keys)}")


def show_new(before: Verdicts, now: Verdicts) -> bool:
    """Show programs that end wrong in a way in which no kept one does."""
    known = {(verdict.kind, *sorted(verdict.outcomes)) for verdict in before.values()}
    new = {key: verdict for key, verdict in now.items() if (verdict.kind, *sorted(verdict.outcomes)) not in known}
    new = {key: verdict for key, verdict in new.items() if verdict.kind not in RIGHT}
    if new:
        print("NEW")
        show(new)
    return bool(new)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.worlds", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="write the verdicts instead of comparing them")
    parser.add_argument("--show", action="store_true", help="show the kept verdicts, and run nothing")
    parser.add_argument("--over", nargs="*", default=[*TRANSPORTS], choices=TRANSPORTS, help="the transports")
    parser.add_argument(
        "--letters", type=int, help="the longest words, on two ranks: only new kinds of wrong ends are shown"
    )
    parser.add_argument("--seed", type=int, default=0, help="what decides which rank runs next")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.show:
        show(kept())
        return 0
    sizes = {2: arguments.letters} if arguments.letters else SIZES
    every, now = parts(arguments.over, sizes, arguments.seed), Verdicts()
    for number, found in enumerate(judge_all(every, arguments.processes), 1):
        now.update(found)
        if not number % 100:
            print(f"{number} of {len(every)} parts: {len(now)} programs", file=sys.stderr, flush=True)
    show(now)
    if arguments.keep:
        others = {key: verdict for key, verdict in kept().items() if key[0] not in arguments.over}
        keep({**others, **now})
        return 0
    before = {key: verdict for key, verdict in kept().items() if key[0] in arguments.over}
    if arguments.letters:
        return show_new(before, now)
    differences = changed(before, now)
    for (old, new), keys in sorted(differences.items(), key=lambda item: -len(item[1])):
        print(f"CHANGED {shortest(keys)}:\n    {old}\n    {new}")
    return any(old is None or new is None or old.kind in RIGHT for old, new in differences)


if __name__ == "__main__":
    sys.exit(main())
