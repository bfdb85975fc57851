"""The Docker Engine as an :class:`~dstack_shim.engine.protocol.Engine`.

Each call blocks in a thread; what it answers is turned into our models and errors here, in one
place per call.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TypeVar
from urllib.parse import quote

from dstack_shim_contracts.api import ImagePullProgress

from dstack_shim.engine.connection import Connection, Grip, Limits, Refusal
from dstack_shim.engine.engine_json import (
    Unreadable,
    container_from_list,
    create_body,
    details_from_inspect,
    last_log_lines,
)
from dstack_shim.engine.events import Following
from dstack_shim.engine.protocol import (
    LABEL_IS_TASK,
    Container,
    ContainerDetails,
    ContainerEvent,
    ContainerSpec,
    Credentials,
    EngineInfo,
    Sink,
)
from dstack_shim.engine.pull import PullStream
from dstack_shim.engine.reference import Reference, parse_reference
from dstack_shim.engine.workers import Workers
from dstack_shim.errors import (
    ContainerNotFound,
    EngineError,
    EngineUnreachable,
    ImageNotFound,
    NameConflict,
    PullCancelled,
    PullFailed,
    StartFailed,
)
from dstack_shim.log import EventLog, event_log

T = TypeVar("T")

DEFAULT_WORKERS = 8

_CONTAINER_REF = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*")
_OWNER_IN_CONFLICT = re.compile(r'by container "?([0-9a-f]{12,64})"?')
_ONLY_TASKS = json.dumps({"label": [f"{LABEL_IS_TASK}=true"]})
_LONGEST_MESSAGE = 64 << 10
_REMOVAL_WAIT = 0.1  # s between looks at a removal somebody else began
_REMOVAL_LOOKS = 100
_ABORT_GRACE = 0.5  # s for the thread of a stream to see that its connection was shut


class DockerEngine:
    """The engine that ``DOCKER_HOST`` and its kin in ``environ`` point to.

    Nothing is asked before the first call. ``workers`` are the threads of short calls, or how
    many of them to have; a pull, and a stop that gives grace, have threads of their own and
    hold up nobody.
    """

    def __init__(
        self,
        environ: Mapping[str, str] | None = None,
        *,
        workers: int | Workers = DEFAULT_WORKERS,
        limits: Limits | None = None,
        log: EventLog | None = None,
    ) -> None:
        self._limits = limits or Limits()
        self._workers = workers if isinstance(workers, Workers) else Workers(workers)
        pool_size = self._workers.size + 2
        self._connection = Connection(environ, limits=self._limits, pool_size=pool_size)
        self._log = log or event_log()
        self._told: frozenset[str] = frozenset()

    async def ping(self) -> EngineInfo:
        """Ask who is there, and agree on an API version anew."""

        def ask() -> EngineInfo:
            self._connection.agree_on_version()
            info = self._connection.call("GET", "/info", limit=self._limits.greeting).json()
            if not isinstance(info, dict):
                raise EngineUnreachable("the engine describes itself in no way we can read")
            version, root_dir = info.get("ServerVersion"), info.get("DockerRootDir")
            return EngineInfo(
                version=version if isinstance(version, str) else "",
                api_version=self._connection.api_version,
                root_dir=root_dir if isinstance(root_dir, str) else "",
            )

        return await self._workers.run(ask)

    async def list_task_containers(self) -> tuple[Container, ...]:
        """All containers labelled as tasks, in one request."""

        def ask() -> object:
            params = {"all": "1", "filters": _ONLY_TASKS}
            return self._connection.call(
                "GET", "/containers/json", limit=self._limits.ask, params=params
            ).json()

        answer = await self._workers.run(ask)
        if not isinstance(answer, list):
            # null too: an empty list ends every task, so it must have been said.
            raise EngineUnreachable("the engine's list of containers is no list")
        found, odd = [], {}
        for item in answer:
            try:
                found.append(container_from_list(item))
            except Unreadable as why:
                odd[str(item.get("Id") if isinstance(item, dict) else item)[:64]] = why
        self._tell_once(odd)
        return tuple(found)

    async def events(
        self,
        since: float,
        on_begin: Callable[[], None],
        on_event: Callable[[ContainerEvent], None],
    ) -> None:
        """Tell what becomes of task containers until the stream ends, in a thread of its own."""
        following = Following(self._connection, self._limits, on_begin, on_event)
        work = asyncio.ensure_future(self._workers.run_apart(partial(following.run, since)))
        try:
            await asyncio.wait({work})
            work.result()
        finally:
            following.stop()
            work.add_done_callback(_forget)
            await asyncio.wait({work}, timeout=_ABORT_GRACE)

    async def inspect(self, ref: str) -> ContainerDetails:
        """Everything about one container."""
        path = f"{_container(ref)}/json"

        def ask() -> ContainerDetails:
            answer = self._connection.call("GET", path, limit=self._limits.ask)
            try:
                return details_from_inspect(answer.json())
            except Unreadable as why:
                raise EngineError(f"the engine's words on container {ref}: {why}") from why

        return await self._run(ask, on_refusal={404: ContainerNotFound})

    async def create(self, spec: ContainerSpec) -> str:
        """Make the container; nothing runs yet."""
        params = {"name": spec.name}

        def make() -> str:
            answer = self._connection.call(
                "POST",
                "/containers/create",
                limit=self._limits.work,
                params=params,
                body=create_body(spec),
            ).json()
            container_id = answer.get("Id") if isinstance(answer, dict) else None
            if not isinstance(container_id, str) or not container_id:
                raise EngineUnreachable("the engine does not say what it created")
            return container_id

        try:
            return await self._workers.run(make)
        except Refusal as refusal:
            if refusal.status == 404 and "no such image" in str(refusal).lower():
                raise ImageNotFound(str(refusal)) from refusal
            if refusal.status == 409:
                owner = _OWNER_IN_CONFLICT.search(str(refusal))
                raise NameConflict(str(refusal), owner[1] if owner else "") from refusal
            raise

    async def start(self, container_id: str) -> None:
        """Run it; fine if it runs already."""
        try:
            await self._post(f"{_container(container_id)}/start", limit=self._limits.work)
        except Refusal as refusal:
            if refusal.status == 404 and "no such container" in str(refusal).lower():
                raise ContainerNotFound(str(refusal)) from refusal
            raise StartFailed(str(refusal)) from refusal

    async def stop(self, container_id: str, timeout: int) -> None:
        """Return once it does not run; stopped already or gone is fine."""
        run = self._workers.run if timeout <= 0 else self._workers.run_apart
        call = partial(
            self._connection.call,
            "POST",
            f"{_container(container_id)}/stop",
            limit=max(timeout, 0) + self._limits.stop,
            params={"t": str(max(timeout, 0))},
        )
        try:
            await run(call)
        except Refusal as refusal:
            if refusal.status != 404:
                raise

    async def remove(self, container_id: str) -> None:
        """Remove it with its anonymous volumes; gone is fine."""
        path = _container(container_id)
        params = {"force": "1", "v": "1"}
        call = partial(
            self._connection.call, "DELETE", path, limit=self._limits.work, params=params
        )
        for _ in range(_REMOVAL_LOOKS):
            try:
                await self._workers.run(call)
            except Refusal as refusal:
                if refusal.status == 404:
                    return
                if refusal.status != 409 or "already in progress" not in str(refusal):
                    raise
            else:
                return
            # Somebody else's removal of it is under way: ours is done when theirs is.
            await asyncio.sleep(_REMOVAL_WAIT)
        raise EngineError(f"container {container_id}: another removal of it does not end")

    async def last_lines(self, container_id: str, n: int) -> str:
        """The last ``n`` lines of its output, at most 64 KiB of them."""
        call = partial(
            self._connection.call,
            "GET",
            f"{_container(container_id)}/logs",
            limit=self._limits.ask,
            params={"stdout": "1", "stderr": "1", "tail": str(n)},
        )
        answer = await self._run(call, on_refusal={404: ContainerNotFound})
        return last_log_lines(answer.body, n)[-_LONGEST_MESSAGE:]

    async def has_image(self, ref: str) -> bool:
        """Whether the image is here already. Raises ``PullFailed`` for what is no reference."""
        parse_reference(ref)
        path = f"/images/{quote(ref, safe='/:@')}/json"
        try:
            await self._workers.run(
                partial(self._connection.call, "GET", path, limit=self._limits.ask)
            )
        except Refusal as refusal:
            if refusal.status == 404:
                return False
            raise
        return True

    async def pull(
        self,
        ref: str,
        credentials: Credentials | None,
        log: Sink | None,
        on_progress: Callable[[ImagePullProgress], None],
        cancel: asyncio.Event,
    ) -> None:
        """Fetch the image; return when the engine says it has it."""
        reference = parse_reference(ref)
        show = _Latest(on_progress, asyncio.get_running_loop(), self._log)
        pull = _Pull(self._connection, self._limits.pull, PullStream(log, self._log), show.put)
        work = asyncio.ensure_future(
            self._workers.run_apart(partial(pull.run, reference, credentials))
        )
        stopper = asyncio.ensure_future(cancel.wait())
        try:
            await asyncio.wait(
                {work, stopper}, timeout=self._limits.pull, return_when=asyncio.FIRST_COMPLETED
            )
            if work.done():
                return work.result()
            if stopper.done():
                raise PullCancelled(f"the pull of {ref} was cancelled")
            minutes = self._limits.pull / 60
            raise PullFailed(f"the pull of {ref} did not finish within {minutes:g} minutes")
        finally:
            stopper.cancel()
            show.stop()
            pull.abort()
            work.add_done_callback(_forget)
            await asyncio.wait({work}, timeout=_ABORT_GRACE)

    async def close(self) -> None:
        """Give up connections and threads."""
        self._workers.close()
        self._connection.close()

    def _tell_once(self, odd: Mapping[str, Unreadable]) -> None:
        """Log containers nobody can read when they appear, not at every list."""
        for container, why in odd.items():
            if container not in self._told:
                self._log.warning("container.unreadable", container=container, why=why)
        self._told = frozenset(odd)

    async def _post(self, path: str, *, limit: float) -> None:
        await self._workers.run(partial(self._connection.call, "POST", path, limit=limit))

    async def _run(
        self, call: Callable[[], T], *, on_refusal: Mapping[int, type[EngineError]]
    ) -> T:
        try:
            return await self._workers.run(call)
        except Refusal as refusal:
            raise on_refusal.get(refusal.status, EngineError)(str(refusal)) from refusal


class _Pull:
    """One pull, run in a thread and aborted from another."""

    def __init__(
        self,
        connection: Connection,
        limit: float,
        stream: PullStream,
        on_change: Callable[[ImagePullProgress | None], None],
    ) -> None:
        self._connection = connection
        self._limit = limit
        self._stream = stream
        self._on_change = on_change
        self._lock = threading.Lock()
        self._grip = Grip()

    def run(self, reference: Reference, credentials: Credentials | None) -> None:
        try:
            with (
                self._connection.open(
                    "POST",
                    "/images/create",
                    limit=self._limit,
                    params={"fromImage": reference.name, "tag": reference.version},
                    headers=_login(reference, credentials) if credentials else None,
                ) as response,
                self._grip.on(response),
            ):
                for chunk in response.iter_content(chunk_size=None):
                    if not self._take(chunk):
                        return
        except Refusal as refusal:
            raise PullFailed(str(refusal)) from refusal
        self._stream.finish()

    def abort(self) -> None:
        """End the reading, see :meth:`Grip.cut`; nothing is written after."""
        with self._lock:
            self._grip.cut()

    def _take(self, chunk: bytes) -> bool:
        with self._lock:
            if self._grip.is_cut:
                return False
            self._stream.feed(chunk)
        self._on_change(self._stream.progress)
        return True


class _Latest:
    """Hands the newest progress to the event loop, skipping what it has no time for."""

    def __init__(
        self,
        show: Callable[[ImagePullProgress], None],
        loop: asyncio.AbstractEventLoop,
        log: EventLog,
    ) -> None:
        self._show = show
        self._loop = loop
        self._log = log
        self._lock = threading.Lock()
        self._newest: ImagePullProgress | None = None
        self._is_due = False
        self._stopped = False

    def put(self, progress: ImagePullProgress | None) -> None:
        """From the pull's thread."""
        with self._lock:
            if self._stopped or progress == self._newest:
                return
            self._newest = progress
            due, self._is_due = self._is_due, True
        if not due:
            with suppress(RuntimeError):  # the loop is closed: nobody looks any more
                self._loop.call_soon_threadsafe(self._deliver)

    def stop(self) -> None:
        """Show what is left, then nothing more."""
        with self._lock:
            self._stopped = True
        self._deliver()

    def _deliver(self) -> None:
        with self._lock:
            was_due, self._is_due = self._is_due, False
            newest = self._newest
        if was_due and newest is not None:
            try:
                self._show(newest)
            except Exception as error:  # noqa: BLE001 - showing progress must never fail a pull
                self._log.fault("pull.progress_failed", error)


def _login(reference: Reference, credentials: Credentials) -> dict[str, str]:
    login = {
        "username": credentials.username,
        "password": credentials.password,
        "serveraddress": reference.login_address,
    }
    return {"X-Registry-Auth": base64.urlsafe_b64encode(json.dumps(login).encode()).decode()}


def _container(ref: str) -> str:
    """The path of a container. What is no id or name names none, and must not become a path."""
    if not _CONTAINER_REF.fullmatch(ref):
        raise ContainerNotFound(f"{ref[:200]!r} is not the id or name of a container")
    return f"/containers/{ref}"


def _forget(work: asyncio.Future[None]) -> None:
    # The caller has its answer; asyncio would log "exception was never retrieved".
    if not work.cancelled():
        work.exception()
