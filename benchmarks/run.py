"""Measures this repository's shim, and perhaps another beside it, and writes the report.

    ./dev bench -- [--peer FILE] [--quick] [--only NAME…]

Everything runs on a private engine in the sandbox. What is measured is kept in
``build/benchmarks/`` and put together from run to run, so that it can be measured in parts:
a part that is measured again replaces what there was of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from benchmarks import picture, report
from benchmarks.absence import absence
from benchmarks.calls import calls
from benchmarks.candidates import OURS, PEER, REAL_TIME, Candidate, candidate
from benchmarks.ends import ends, ends_after_restart, submits
from benchmarks.idle import idle, memory
from benchmarks.restarts import restarts
from benchmarks.samples import Samples, load, read
from benchmarks.stand import Stand
from benchmarks.starts import cold_starts, kills, versions
from tools import interpreters

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build" / "benchmarks" / "results.json"
PAGE, PICTURE = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "benchmarks.svg"


@attrs.frozen
class Counts:
    """How much is measured."""

    ends: int = 40
    submits: int = 20
    span: float = 30.0
    idle_tasks: tuple[int, ...] = (0, 10, 100)
    many: int = 200
    kill_tasks: tuple[int, ...] = (1, 64, 200)
    rounds: int = 10
    kills: int = 5
    replacements: int = 200
    calls: int = 2000


QUICK = Counts(
    ends=4,
    submits=3,
    span=5.0,
    idle_tasks=(0, 10),
    many=10,
    kill_tasks=(1,),
    rounds=2,
    kills=1,
    replacements=2,
    calls=100,
)
Part = Callable[[], None]
_TURNS = 2


def main(arguments: list[str]) -> int:
    """Measure what was asked for and write what is known."""
    options = _parse(arguments)
    prefix = REAL_TIME if options.real_time else ()
    candidates = [candidate(OURS, options.shim, prefix)]
    if options.peer:
        candidates.append(candidate(PEER, options.peer, prefix))
    samples = Samples()
    everything = samples
    stand = Stand()
    try:
        facts = _facts(candidates, stand.client.version()["Version"], options)
        for name, part in _parts(stand, candidates, samples, _counts(options)).items():
            if not options.only or name in options.only:
                print(f"measuring {name}", flush=True)
                part()
                everything = _keep(samples, facts, options)
    finally:
        stand.close()
    for line in report.lines(everything):
        print(line)
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./dev bench --", description=__doc__)
    parser.add_argument("--shim", type=Path, default=ROOT / "dist" / "dstack-shim")
    parser.add_argument("--peer", type=Path, help="another shim, measured in turns with ours")
    parser.add_argument("--peer-name", default="another shim", help="what to call it")
    parser.add_argument("--quick", action="store_true", help="little of everything, for a look")
    parser.add_argument("--replacements", type=int, help="how many (200)")
    parser.add_argument(
        "--real-time",
        action="store_true",
        help="let nothing else on a busy machine take a shim's turn (its engine's, it may)",
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these parts")
    parser.add_argument("--output", type=Path, help="a folder for the report instead of docs/")
    return parser.parse_args(arguments)


def _counts(options: argparse.Namespace) -> Counts:
    counts = QUICK if options.quick else Counts()
    if options.replacements is not None:
        counts = attrs.evolve(counts, replacements=options.replacements)
    return counts


PARTS = (
    "size",
    "version",
    "cold",
    "kills",
    "restarts",
    "ends",
    "absence",
    "submits",
    "api",
    "idle",
    "memory",
)


def _parts(
    stand: Stand, candidates: list[Candidate], samples: Samples, counts: Counts
) -> Mapping[str, Part]:
    def in_turns(measure: Callable[..., None], turns: int, **how: Any) -> None:
        for _ in range(turns):
            for each in candidates:
                measure(stand, each, samples, **how)

    def sizes() -> None:
        for each in candidates:
            samples.add("size", each.name, [each.size / 1e6])

    both, fifty = (stand, candidates, samples), min(50, counts.many)
    parts: tuple[Part, ...] = (
        sizes,
        partial(versions, candidates, samples, rounds=3 * counts.rounds),
        partial(cold_starts, *both, pythons=interpreters.interpreters(), rounds=counts.rounds),
        partial(
            _all_of,
            *(partial(kills, *both, tasks=n, rounds=counts.kills) for n in counts.kill_tasks),
        ),
        partial(in_turns, restarts, 1, tasks=counts.many, rounds=counts.rounds),
        partial(
            _all_of,
            *(
                partial(in_turns, ends, _TURNS, running=n, count=counts.ends // _TURNS)
                for n in (1, fifty)
            ),
            partial(in_turns, ends_after_restart, 1, running=fifty, count=min(fifty, counts.ends)),
        ),
        partial(absence, *both, count=counts.replacements),
        partial(in_turns, submits, _TURNS, count=max(1, counts.submits // _TURNS)),
        partial(calls, *both, count=counts.calls),
        partial(
            _all_of,
            *(
                partial(idle, *both, tasks=n, span=counts.span, rounds=1)
                for n in counts.idle_tasks
            ),
        ),
        partial(
            _all_of,
            *(partial(memory, *both, tasks=n, rounds=_TURNS) for n in (0, counts.many)),
        ),
    )
    return dict(zip(PARTS, parts, strict=True))


def _all_of(*parts: Part) -> None:
    for part in parts:
        part()


def _facts(
    candidates: list[Candidate], engine: str, options: argparse.Namespace
) -> dict[str, str]:
    names = {OURS: "this shim", PEER: options.peer_name}
    facts = {each.name: f"{names[each.name]} {each.version}" for each in candidates}
    machine = f"{os.cpu_count()} processors, Linux {platform.release().split('-')[0]}, Docker Engine {engine}"
    if options.real_time:
        machine += "; the machine was busy, the shims had their turns in real time"
    return {"machine": machine, **facts}


def _keep(samples: Samples, facts: dict[str, str], options: argparse.Namespace) -> Samples:
    """Put what is known by now together with earlier runs, and write it; a look is not kept."""
    folder = options.output
    kept = load(KEPT) if folder is None else {}
    everything = read(kept.get("samples", {}))
    everything.replace(samples)
    facts = {**kept.get("facts", {}), **facts}
    page, drawing = (folder / PAGE.name, folder / PICTURE.name) if folder else (PAGE, PICTURE)
    page.write_text(report.markdown(everything, facts), encoding="utf-8")
    drawing.write_text(picture.draw(everything, facts.get(PEER, "")), encoding="utf-8")
    if folder is None:
        KEPT.parent.mkdir(parents=True, exist_ok=True)
        document = {"facts": facts, "samples": everything.document()}
        KEPT.write_text(json.dumps(document, indent=1), encoding="utf-8")
    return everything


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
