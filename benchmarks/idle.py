"""What a shim costs while nothing happens."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.candidates import Candidate
from benchmarks.samples import Samples
from benchmarks.stand import Stand

_SETTLE = 3.0  # s after the start until nothing of it goes on any more
_TICKS = os.sysconf("SC_CLK_TCK")


def idle(
    stand: Stand,
    candidates: Sequence[Candidate],
    samples: Samples,
    *,
    tasks: int,
    span: float,
    rounds: int,
) -> None:
    """Let each candidate have ``tasks`` running tasks for ``span`` seconds, in turns."""
    with stand.populated(candidates[0], tasks) as home, stand.proxy() as proxy:
        for _ in range(rounds):
            for candidate in candidates:
                with stand.shim(candidate, home, address=proxy.address) as shim:
                    time.sleep(_SETTLE)
                    engine = [stand.engine.pid, *_children(stand.engine.pid)]
                    before = _cpu(engine), _cpu([shim.pid])
                    proxy.forget()
                    began = time.monotonic()
                    time.sleep(span)
                    per_minute = 60 / (time.monotonic() - began)
                    requests = len(proxy.requests)
                    after = _cpu(engine), _cpu([shim.pid])
                told = {
                    "requests": requests,
                    "engine": (after[0] - before[0]) * 1000,
                    "shim": (after[1] - before[1]) * 1000,
                }
                for what, value in told.items():
                    samples.add(f"idle {tasks} {what}", candidate.name, [value * per_minute])


def _children(pid: int) -> list[int]:
    """The engine's containerd; what keeps single containers alive has another parent."""
    return [int(word) for word in _read(f"/proc/{pid}/task/{pid}/children").split()]


def _cpu(pids: Iterable[int]) -> float:
    """Seconds of processor time that these processes have taken, their finished children's too."""
    ticks = 0
    for pid in pids:
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS


def _read(path: str) -> str:
    return Path(path).read_text(encoding="ascii")


def memory(
    stand: Stand, candidates: Sequence[Candidate], samples: Samples, *, tasks: int, rounds: int
) -> None:
    """What each candidate keeps in memory with so many tasks, after it has listed them once."""
    with stand.populated(candidates[0], tasks) as home:
        for _ in range(rounds):
            for candidate in candidates:
                with stand.shim(candidate, home) as shim:
                    shim.client.tasks()
                    time.sleep(_SETTLE)
                    samples.add(f"rss {tasks}", candidate.name, [_resident(shim.pid)])


def _resident(pid: int) -> float:
    """Resident memory in MB (10⁶ bytes)."""
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise ProcessLookupError(f"process {pid} has no memory")
