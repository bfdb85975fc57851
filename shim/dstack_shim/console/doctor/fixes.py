"""``doctor --fix``: cures for what is this shim's beyond doubt, each asked for by itself.

While it works it holds the home's lock, so that no shim starts or gives back the same things. A
shim that runs mends most of this itself and is left to it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dstack_shim_contracts.api import TaskConfig, VolumeInfo
from dstack_shim_contracts.record import TaskRecord

from dstack_shim.console.doctor.facts import Facts, closed_to_others
from dstack_shim.console.doctor.findings import Check, Cure, Fix
from dstack_shim.console.text import shown
from dstack_shim.doctor import at_once
from dstack_shim.engine.protocol import Engine
from dstack_shim.errors import HomeLocked, ShimError
from dstack_shim.home import lock_home
from dstack_shim.host.commands import run as run_command
from dstack_shim.log import event_log
from dstack_shim.resources.host_keys import HostKeys
from dstack_shim.resources.volumes import Volumes
from dstack_shim.store import Store

STOP_GRACE = 10
"""Seconds a container gets to end by itself."""

Ask = Callable[[str], bool]
"""Asks a person; whether the answer is yes."""
Tell = Callable[[str], None]


@contextmanager
def alone(home: Path) -> Iterator[None]:
    """Hold the home's lock.

    Raises ``ShimError`` if a shim has it.
    """
    try:
        lock = lock_home(home)
    except HomeLocked as error:
        raise ShimError(
            f"--fix: {error}. It mends most of this itself; to do it here, stop it first: jobs go "
            "on meanwhile"
        ) from error
    try:
        yield
    finally:
        os.close(lock)


async def mend(
    facts: Facts, found: tuple[Check, ...], engine: Engine, ask: Ask, tell: Tell
) -> None:
    """Offer every cure there is and carry out those that are wanted."""
    offered = [(check, check.fix) for check in found if check.fix is not None]
    if not offered:
        tell("nothing here can be mended by --fix")
    for check, fix in offered:
        if not ask(f"{check.what}: {check.words}; {fix.cure.value}?"):
            continue
        try:
            await _carry_out(fix, facts, engine)
        except (ShimError, OSError) as error:
            tell(shown(f"{check.what}: not mended: {error}"))
        else:
            tell(shown(f"{check.what}: mended"))


async def _carry_out(fix: Fix, facts: Facts, engine: Engine) -> None:
    assert facts.sources is not None
    if fix.cure is Cure.CLOSE:
        _close(Path(fix.target))
    elif fix.cure is Cure.SWEEP:
        Store(facts.sources.home, event_log()).open()
    elif fix.cure is Cure.STOP:
        await engine.stop(fix.target, STOP_GRACE)
    else:
        await _give_back(fix, facts)


def _close(path: Path) -> None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags)
    try:
        os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode) & ~closed_to_others(path))
    finally:
        os.close(fd)


async def _give_back(fix: Fix, facts: Facts) -> None:
    """As a task that is gone would have: what another task needs stays."""
    config = TaskConfig(id="", host_ssh_user=fix.target, host_ssh_keys=("-",))
    if fix.cure is Cure.UNMOUNT:
        config = TaskConfig(id="", volumes=(VolumeInfo(name=fix.target),))
    gone = TaskRecord("", config)
    if fix.cure is Cure.UNMOUNT:
        await Volumes(run_command, at_once, event_log()).release(gone, lambda: facts.holders)
    else:
        await HostKeys(at_once, event_log()).release(gone, lambda: facts.holders)
