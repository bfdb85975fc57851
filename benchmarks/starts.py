"""How long it takes until a shim answers: started, killed, or only asked for its version."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from dstack_shim_contracts.errors import ShimUnreachable

from benchmarks.candidates import OURS, Candidate, ask_version
from benchmarks.samples import Samples
from benchmarks.stand import Stand
from tests.eventually import eventually
from tests.lab.shim import ShimProcess
from tests.lab.supervisor import Supervisor

PAUSE = 3.0  # s that dstack's supervisors wait before they start a shim again
_LOOK = 0.002
_DEBIAN = Path("/usr/bin/python3")


def versions(candidates: Sequence[Candidate], samples: Samples, *, rounds: int) -> None:
    """Ask each for its version, in turns."""
    for _ in range(rounds):
        for candidate in candidates:
            began = time.perf_counter()
            ask_version(candidate.command)
            samples.add("version", candidate.name, [time.perf_counter() - began])


def cold_starts(
    stand: Stand,
    candidates: Sequence[Candidate],
    samples: Samples,
    *,
    pythons: Mapping[str, Path],
    rounds: int,
) -> None:
    """Start each with 1 task; ours on each Python, a peer as it starts by itself."""
    ways: dict[str, Path] = {"debian": _DEBIAN} if _DEBIAN.exists() else {}
    ways |= pythons
    with stand.populated(candidates[0], 1) as home:
        for _ in range(rounds):
            for candidate in candidates:
                if candidate.name != OURS:
                    seconds = _cold(stand.unstarted(candidate, home))
                    for way in ways:
                        samples.add(f"cold {way}", candidate.name, [seconds])
                    continue
                for way, python in ways.items():
                    seconds = _cold(stand.unstarted(candidate, home, python=python))
                    samples.add(f"cold {way}", candidate.name, [seconds])


def _cold(shim: ShimProcess) -> float:
    """Seconds from the start of the process to its first answer; it is killed then."""
    began = time.perf_counter()
    shim.launch()
    eventually(shim.answers, within=60, every=_LOOK, saying="the shim answers")
    seconds = time.perf_counter() - began
    shim.close()
    return seconds


def kills(
    stand: Stand, candidates: Sequence[Candidate], samples: Samples, *, tasks: int, rounds: int
) -> None:
    """Kill each under a supervisor and wait for the next to answer."""
    with stand.populated(candidates[0], tasks) as home:
        for candidate in candidates:
            with supervised(stand, candidate, home) as (supervisor, shim):
                for _ in range(rounds):
                    began = time.perf_counter()
                    gone = supervisor.kill()
                    supervisor.wait_for_end(gone)
                    eventually(lambda: answers(shim), within=60, every=_LOOK, saying="it is back")
                    seconds = time.perf_counter() - began
                    samples.add(f"kill {tasks}", candidate.name, [seconds])


@contextmanager
def supervised(
    stand: Stand, candidate: Candidate, home: Path, *flags: str
) -> Iterator[tuple[Supervisor, ShimProcess]]:
    """A shim that is started again whenever it ends, and how to ask it."""
    shim = stand.unstarted(candidate, home, *flags)
    supervisor = Supervisor(shim.command, environ=shim.environ, log=shim.stderr, pause=PAUSE)
    supervisor.start()
    try:
        eventually(lambda: answers(shim), within=60, saying="the shim answers")
        yield supervisor, shim
    finally:
        supervisor.stop()
        shim.client.close()


def answers(shim: ShimProcess) -> bool:
    """Whether anybody answers there."""
    try:
        shim.client.healthcheck()
    except ShimUnreachable:
        return False
    return True
