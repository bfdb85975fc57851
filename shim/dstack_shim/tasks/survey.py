"""What a restart finds on a host, looked at without changing anything."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import attrs
from dstack_shim_contracts.record import TaskRecord

from dstack_shim.engine.protocol import Container, Engine
from dstack_shim.errors import ResourceError
from dstack_shim.log import EventLog
from dstack_shim.records import FoundDir, Records
from dstack_shim.resources.protocol import Blocking
from dstack_shim.tasks.recovery import HostFacts, Plan, doubtful, plan

ConfirmKeys = Callable[[TaskRecord], Awaitable["tuple[str, ...]"]]
"""Those of the record's keys that stand on our lines of the user's authorized_keys already.
Raises ``ResourceError``."""


@attrs.frozen
class Survey:
    """Task directories, labelled containers and host at one moment, for the shim at ``home``."""

    home: str
    found: tuple[FoundDir, ...]
    containers: tuple[Container, ...]
    facts: HostFacts

    def plan(self) -> Plan:
        """What a restart would make of it."""
        return plan(self.found, self.containers, self.home, self.facts)


async def survey(
    records: Records,
    engine: Engine,
    confirm_keys: ConfirmKeys,
    blocking: Blocking,
    home: str,
    log: EventLog,
) -> Survey:
    """Look at records, containers and host.

    Raises ``EngineError`` and ``StoreError``.
    """
    # Records first: a container made by nobody else meanwhile is impossible (the home is
    # locked), and a record without its container would only be looked at once more.
    found = await blocking(records.scan)
    containers = await engine.list_task_containers()
    confirmed = {}
    for item in doubtful(found, containers, home):
        assert item.record is not None  # or it could not be doubted
        try:
            confirmed[item.name] = await confirm_keys(item.record)
        except ResourceError as error:
            log.error("host_keys.unknown", task=item.record.id, error=error)  # noqa: TRY400 - no fault of ours: no trace
    return Survey(home, found, containers, HostFacts(confirmed))
