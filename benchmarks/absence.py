"""What clients notice of a replacement, each shim in its own way."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from benchmarks.candidates import HOST_PATH, OURS, Candidate
from benchmarks.samples import Samples
from benchmarks.stand import Stand
from benchmarks.starts import PAUSE
from tests.lab.shim_files import variant
from tests.lab.site import Site
from tests.lab.traffic import Traffic
from tests.shim.file_server import FileServer, serving

RATE = 200  # requests a second
TASKS = 8
_MOST_OF_A_PEER = 20  # each takes its supervisor's pause


def absence(
    stand: Stand, candidates: Sequence[Candidate], samples: Samples, *, count: int
) -> None:
    """Replace each candidate ``count`` times, a peer at most 20 times."""
    for candidate in candidates:
        times = count if candidate.name == OURS else min(count, _MOST_OF_A_PEER)
        with stand.home() as folder, serving() as files:
            site = _site(stand, candidate, folder, files)
            try:
                for number in range(TASKS):
                    site.run_task(f"t{number}", stand.images)
                for number in range(times):
                    _replaced(site, candidate, number, samples)
            finally:
                site.close()


def _site(stand: Stand, candidate: Candidate, folder: Path, files: FileServer) -> Site:
    environ = {"PATH": HOST_PATH}
    content = candidate.path.read_bytes()
    site = Site(
        folder,
        stand.engine,
        content,
        files,
        environ=environ,
        pause=PAUSE,
        prefix=candidate.prefix,
    )
    site.start()
    return site


def _replaced(site: Site, candidate: Candidate, number: int, samples: Samples) -> None:
    """One replacement under traffic."""
    with redirect_stdout(io.StringIO()), Traffic(rate=RATE) as traffic:
        if candidate.name == OURS:
            version = f"{candidate.version}.post{number}"
            site.install(variant(candidate.path, version))
            began = time.monotonic()
            site.client.shutdown()
            site.wait_for_version(version)
        else:
            before = site.pid
            began = time.monotonic()
            site.client.shutdown()
            site.supervisor.wait_for_end(before, within=60)
            site.wait_until_it_answers()
        away = time.monotonic() - began
    refused = sum("ConnectionRefusedError" in problem for problem in traffic.problems)
    samples.add("absence refused", candidate.name, [refused])
    samples.add("absence failed", candidate.name, [len(traffic.problems) - refused])
    # Who is refused has no answer to wait for: then it is away until somebody answers.
    wait = away if traffic.problems else traffic.longest
    samples.add("absence wait", candidate.name, [wait])
