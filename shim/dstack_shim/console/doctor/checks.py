"""From what was found to what is said of it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from dstack_shim import build
from dstack_shim.console.doctor.facts import Disk, Facts
from dstack_shim.console.doctor.findings import (
    Check,
    Cure,
    Fix,
    broken,
    of_examination,
    ok,
    warning,
)
from dstack_shim.console.doctor.holdings import of_containers, of_gpus, of_keys, of_volumes
from dstack_shim.console.screen import size

OLDEST_API = (1, 41)
"""Of the engine: Docker 20.10."""

_LOW, _FULL = 0.10, 0.02  # shares of a disk
_ROOMY = 50_000_000_000  # bytes; more than that is enough, whatever share it is
_LOG_LIMIT = 1 << 30
_START = "start it: systemctl start dstack-shim, or as this host starts it; jobs go on meanwhile"


def checks(facts: Facts) -> tuple[Check, ...]:
    """Everything that is to be said, what matters first."""
    found = [
        *map(of_examination, facts.seen.findings),
        *_of_shim(facts),
        *_of_engine(facts),
        *_of_runner(facts),
        *of_containers(facts),
        *of_gpus(facts),
        *of_volumes(facts),
        *of_keys(facts),
        *_of_disks(facts),
        *_of_files(facts),
        *map(of_examination, facts.notes),
    ]
    return tuple(sorted(found, key=lambda check: -check.level))


def _of_shim(facts: Facts) -> Iterator[Check]:
    sources = facts.sources
    if sources is None:
        return
    if sources.shim is not None:
        yield ok("shim", f"answers on port {sources.port}")
        yield from _of_version(sources.shim.healthcheck.version)
    elif sources.holder:
        words = (
            f"process {sources.holder} holds the home but does not answer on port {sources.port}"
        )
        yield broken(
            "shim",
            words,
            "if its --shim-http-port is not another one, kill -9 it: it is started again and "
            "finds every task",
        )
    elif facts.is_port_taken:
        yield broken(
            "port",
            f"port {sources.port} is taken by something that is not the shim of this home",
            f"see what it is (ss -ltnp 'sport = :{sources.port}') and stop it, or give the shim "
            "another --shim-http-port",
        )
    else:
        yield warning("shim", "none runs on this home", _START)


def _of_version(running: str) -> Iterator[Check]:
    here = build.version()
    if running == here:
        yield ok("version", running)
    else:
        yield warning(
            "version",
            f"{running} runs, this file is {here}",
            "restart the shim to run this file; tasks outlive it",
        )


def _of_engine(facts: Facts) -> Iterator[Check]:
    engine = facts.sources.engine if facts.sources else None
    if engine is None:
        return
    numbers = tuple(int(part) for part in engine.api_version.split(".") if part.isdecimal())
    if numbers and numbers < OLDEST_API:
        yield broken(
            "engine version",
            f"Docker Engine {engine.version} speaks API {engine.api_version}",
            "install Docker Engine 20.10 or newer",
        )


def _of_runner(facts: Facts) -> Iterator[Check]:
    if facts.sources is None:
        return
    if not facts.runner:
        yield ok("runner", facts.settings.runner_binary_path)
    elif facts.settings.runner_download_url:
        yield warning("runner", facts.runner, "the next start of the shim fetches it")
    else:
        yield broken(
            "runner",
            f"{facts.runner}: no job can start",
            "let the server install it, or give --runner-binary-path",
        )


def _of_disks(facts: Facts) -> Iterator[Check]:
    for disk in facts.disks:
        what = f"disk of the {disk.what}"
        words = f"{size(disk.free)} free ({disk.free_share:.0%}) at {disk.path}"
        todo = _make_room(disk)
        if disk.free_files_share < _FULL:
            yield broken(what, f"no more files can be made at {disk.path}", todo)
        elif disk.free_share < _FULL and disk.free < _ROOMY:
            yield broken(what, words, todo)
        elif disk.free_share < _LOW and disk.free < _ROOMY:
            yield warning(what, words, todo)
        else:
            yield ok(what, words)


def _make_room(disk: Disk) -> str:
    if disk.what == "engine":
        return "make room: docker image prune -a takes away images that no container uses"
    return "make room: without it no task can start; those that run go on"


def _of_files(facts: Facts) -> Iterator[Check]:
    for path, mode in facts.open_paths.items():
        yield warning(
            f"mode of {path}",
            f"{mode:04o} lets others in",
            "take it away: chmod go-w, or go-rwx for a record",
            Fix(Cure.CLOSE, path),
        )
    for name in facts.leftovers:
        yield warning(
            f"leftover {name}",
            "half made or half gone since a crash",
            "the next start removes it",
            Fix(Cure.SWEEP, name),
        )
    if facts.log_size > _LOG_LIMIT:
        yield warning(
            "log", f"shim.log is {size(facts.log_size)}", "let logrotate copy and truncate it"
        )
