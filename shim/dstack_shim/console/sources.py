"""Whom a command asks: the shim, the engine and the records, all at once; any may be silent."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

import attrs
import httpx
from dstack_shim_contracts.api import (
    HealthcheckResponse,
    ImagePullProgress,
    InstanceHealth,
    TaskListItem,
)
from dstack_shim_contracts.client import ShimClient
from dstack_shim_contracts.errors import ClientError, ShimResponseError, ShimUnreachable
from dstack_shim_contracts.statuses import TaskStatus

from dstack_shim.engine.glance import Glance, local_socket
from dstack_shim.engine.protocol import Container, ContainerDetails, Engine, EngineInfo
from dstack_shim.errors import EngineError, ShimError, StartupError, StoreError
from dstack_shim.home import check_home, holder
from dstack_shim.log import event_log
from dstack_shim.records import FoundDir
from dstack_shim.settings import Settings
from dstack_shim.store import Store

SHIM_PATIENCE = 2.0
"""Seconds the shim gets for each answer."""
ENGINE_PATIENCE = 3.0
"""Seconds the engine gets for each answer."""

FromEngine = tuple["tuple[Container, ...] | None", "EngineInfo | None", str]
"""Its containers, who it is, and why there is neither."""

_MOST_PULLS = 20  # asked for one by one


@attrs.frozen
class ShimSays:
    """What a shim that answers said: who it is, its tasks, and how far their pulls are."""

    healthcheck: HealthcheckResponse
    tasks: tuple[TaskListItem, ...]
    progress: Mapping[str, ImagePullProgress]
    health: InstanceHealth | None = None
    """Asked for only if wanted; None: not asked, or older than the question."""


@attrs.frozen(repr=False)  # it would be as long as all records
class Sources:
    """All that was to be had at one moment. What is None was not; ``problems`` says why.

    ``holder`` is the process that holds the home's lock.
    """

    home: Path
    port: int
    found: tuple[FoundDir, ...]
    shim: ShimSays | None
    containers: tuple[Container, ...] | None
    engine: EngineInfo | None = None
    holder: int | None = None
    problems: tuple[str, ...] = ()

    @property
    def engine_answers(self) -> bool:
        """Whether the containers are known."""
        return self.containers is not None


async def look(settings: Settings, engine: Engine | None = None, *, deep: bool = False) -> Sources:
    """Ask everybody. ``deep`` asks for what only ``status`` tells, too.

    ``engine`` None: the one the environment points to, asked in the quickest way. Raises ``ShimError`` if the home or its
    records cannot be read: then there is nothing to tell.
    """
    try:
        home = check_home(settings.home())
    except StartupError as error:
        raise ShimError(f"{error}; --shim-home says which") from error
    port = settings.shim_http_port
    shim, (containers, info, engine_problem), found = await asyncio.gather(
        asyncio.to_thread(_ask_shim, port, deep),
        _ask_engine(engine, deep) if engine else _glance(deep),
        asyncio.to_thread(_read, home),
    )
    says, shim_problem = shim
    pid, lock_problem = _lock(home)
    is_ours = says is not None and says.healthcheck.implementation is not None
    if is_ours and not pid and not lock_problem:
        says = None
        shim_problem = f"the shim on port {port} is one of another home than {home}"
    elif says is None and pid:
        shim_problem += f"; but process {pid} holds {home}"
    problems = (shim_problem, engine_problem, lock_problem)
    return Sources(
        home, port, found, says, containers, info, pid, tuple(text for text in problems if text)
    )


def details_of(container_id: str) -> ContainerDetails | None:
    """What the engine says of one container; None if it is gone, or the engine with it."""
    path = local_socket(os.environ)
    try:
        if path is not None:
            return Glance(path, ENGINE_PATIENCE).inspect(container_id)
        return asyncio.run(_inspect_elsewhere(container_id))
    except EngineError:
        return None


async def _inspect_elsewhere(container_id: str) -> ContainerDetails:
    from dstack_shim.engine.docker import DockerEngine  # noqa: PLC0415 - slow to load

    engine = DockerEngine()
    try:
        return await engine.inspect(container_id)
    finally:
        await engine.close()


def _ask_shim(port: int, deep: bool) -> tuple[ShimSays | None, str]:
    # No certificates are loaded for a call to this host: they are a third of the whole time.
    transport = httpx.HTTPTransport(verify=False)
    try:
        with ShimClient(port, timeout=SHIM_PATIENCE, transport=transport) as client:
            health = client.healthcheck()
            tasks = client.tasks()
            pulling = [task.id for task in tasks if task.status is TaskStatus.PULLING]
            infos = (_progress(client, task_id) for task_id in pulling[:_MOST_PULLS])
            progress = {task_id: now for task_id, now in infos if now is not None}
            return ShimSays(health, tasks, progress, _health(client) if deep else None), ""
    except ShimUnreachable:
        return None, f"no shim answers on port {port}"
    except ClientError as error:
        return None, f"what answers on port {port} is no shim, or a broken one: {error}"


def _progress(client: ShimClient, task_id: str) -> tuple[str, ImagePullProgress | None]:
    try:
        return task_id, client.task(task_id).image_pull_progress
    except ShimResponseError:  # removed meanwhile
        return task_id, None


def _health(client: ShimClient) -> InstanceHealth | None:
    try:
        return client.instance_health()
    except ShimResponseError:
        return None


async def _glance(deep: bool) -> FromEngine:
    path = local_socket(os.environ)
    if path is None:
        from dstack_shim.engine.docker import DockerEngine  # noqa: PLC0415 - slow to load

        engine = DockerEngine()
        try:
            return await _ask_engine(engine, deep)
        finally:
            await engine.close()

    def ask() -> FromEngine:
        glance = Glance(path, ENGINE_PATIENCE)
        try:
            info = glance.ping() if deep else None
            return glance.list_task_containers(), info, ""
        except EngineError as error:
            return None, None, str(error)

    return await asyncio.to_thread(ask)


async def _ask_engine(engine: Engine, deep: bool) -> FromEngine:
    try:
        info = await engine.ping() if deep else None
        return await engine.list_task_containers(), info, ""
    except EngineError as error:
        return None, None, str(error)


def _read(home: Path) -> tuple[FoundDir, ...]:
    try:
        return Store(home, event_log()).glance()
    except StoreError as error:
        raise ShimError(f"{error}; only root may read the records") from error


def _lock(home: Path) -> tuple[int | None, str]:
    try:
        return holder(home), ""
    except StartupError as error:
        return None, str(error)
