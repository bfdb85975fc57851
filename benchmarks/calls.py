"""How long single calls of the API take."""

from __future__ import annotations

import time

from benchmarks.candidates import Candidate
from benchmarks.samples import Samples
from benchmarks.stand import Stand

TASKS = 20


def calls(stand: Stand, candidates: list[Candidate], samples: Samples, *, count: int) -> None:
    """Ask each candidate, in turns, for one of its tasks and for the list of them."""
    turns = 4
    with stand.populated(candidates[0], TASKS) as home:
        for _ in range(turns):
            for candidate in candidates:
                with stand.shim(candidate, home) as shim:
                    paths = {"api task": "/api/tasks/t0", "api list": "/api/tasks"}
                    for source, path in paths.items():
                        for _ in range(count // turns):
                            began = time.perf_counter()
                            shim.client.document(path)
                            took = time.perf_counter() - began
                            samples.add(source, candidate.name, [took * 1000])
