"""The shim's and the runner's files: what is installed, and installing another.

A new file is fetched beside the old one, proved by running it with ``--version``, and only
then takes its place; whatever goes wrong before leaves the old file as it was. Servers repeat
an install at every check (14 s and more) while versions differ, so a content that is already
there, or was refused, is not fetched again and again.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from attrs import evolve, frozen
from dstack_shim_contracts.api import (
    RUNNER,
    SHIM,
    Component,
    ComponentInstallRequest,
    Components,
    ComponentStatus,
    FeaturelessComponent,
)

from dstack_shim.download import Fetch, Fetched, fetch, shown
from dstack_shim.errors import (
    ComponentError,
    InstallInProgress,
    InstallRefused,
    ShuttingDown,
    StartupError,
)
from dstack_shim.host.commands import Runner
from dstack_shim.installed import (
    PATIENT,
    FileIdentity,
    ProgramFile,
    ProgramReader,
    read_version,
)
from dstack_shim.log import EventLog
from dstack_shim.staged import StagedFile, file_digest, sweep

REFUSED_FOR = 600.0
"""Seconds for which a content that failed its proof is not tried again."""

_SHA256 = re.compile(r"[0-9a-f]{64}")


@frozen
class Target:
    """A component, and where its file goes.

    ``path`` is what the supervisor starts or containers mount. With ``waiting``, a proved file
    goes there instead, and is what counts as installed as long as it is there; whoever asked
    for that moves it to ``path`` later.
    """

    name: str
    path: Path
    waiting: Path | None = None

    @property
    def destination(self) -> Path:
        """Where a proved file goes."""
        return self.waiting or self.path

    @property
    def installed(self) -> Path:
        """The file that counts as installed."""
        if self.waiting is not None and self.waiting.exists():
            return self.waiting
        return self.path


@frozen
class _Refusal:
    reason: str
    until: float  # monotonic s


@frozen
class _Unfit:
    """A version that was proved and then turned out not to serve."""

    version: str
    beside: FileIdentity | None  # the file at the path meanwhile; another one ends the report


@frozen
class _Seen:
    """The last content a component's URL gave, and what became of it."""

    url: str
    content: Fetched
    identity: FileIdentity | None  # of the installed file that has this content
    refused: bool


class InstalledComponents:
    """The components of this host."""

    def __init__(
        self,
        targets: Sequence[Target],
        run: Runner,
        log: EventLog,
        *,
        fetch: Fetch = fetch,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._targets = {target.name: target for target in targets}
        self._readers = {
            name: ProgramReader(name, run, monotonic=monotonic) for name in self._targets
        }
        self._run = run
        self._log = log
        self._fetch = fetch
        self._monotonic = monotonic
        self._installing: dict[str, asyncio.Task[None]] = {}
        self._seen: dict[str, _Seen] = {}
        self._refused: dict[str, _Refusal] = {}  # by content
        self._unfit: dict[str, _Unfit] = {}
        self._reserved: set[str] = set()
        self._closed = False

    # -- what there is

    async def list(self) -> Components:
        """Return each component as it is on disk now; answers within 6 s whatever the files do."""
        return Components(
            tuple(await asyncio.gather(*(self._component(name) for name in self._targets)))
        )

    async def runner_version(self) -> str:
        """Return the version of the runner that new containers get.

        Raises:
            ComponentError: there is none, or it does not tell.
        """
        target = self._targets[RUNNER]
        file = await self._readers[RUNNER].read(target.installed)
        if file is None:
            raise ComponentError(f"{RUNNER} is not installed at {target.installed}")
        if not file.version:
            raise ComponentError(file.problem)
        return file.version

    async def check_at_start(self) -> None:
        """Check that what is installed can be used, and remove what crashes have left.

        Raises:
            StartupError: a file that is there does not tell its version.
        """
        for name, target in self._targets.items():
            for path in [*sweep(target.path), *sweep(target.destination)]:
                self._log.info("component.leftover_removed", component=name, path=path)
            file = await self._readers[name].read(target.path, timeout=PATIENT)
            if file is not None and not file.version:
                raise StartupError(f"{target.path} is not usable: {file.problem}")
            if target.waiting is not None:
                await self._check_waiting(name, target.waiting)

    async def _check_waiting(self, name: str, waiting: Path) -> None:
        """Drop a file that waits and has become unusable: the one at the path does without it."""
        file = await self._readers[name].read(waiting, timeout=PATIENT)
        if file is not None and not file.version:
            self._log.warning("component.dropped", component=name, error=file.problem)
            await asyncio.to_thread(_unlink, waiting)

    async def fetch_if_missing(self, name: str, url: str) -> None:
        """Install a component now, unless its file is there.

        Raises:
            StartupError: it could not be installed.
        """
        target = self._targets[name]
        if target.installed.exists():
            return
        try:
            await self._bring(target, ComponentInstallRequest(name, url))
        except ComponentError as error:
            raise StartupError(f"{name} could not be downloaded: {error}") from error

    # -- installing

    @property
    def installing(self) -> tuple[str, ...]:
        """The components that are being installed now."""
        return tuple({**self._installing, **dict.fromkeys(self._reserved)})

    async def reserve(self, name: str) -> None:
        """Cancel an install of this component and let none begin, until it is released.

        For who is about to use its file; it is shown as being installed meanwhile.
        """
        self._reserved.add(name)
        task = self._installing.get(name)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    def release(self, name: str) -> None:
        """Let installs begin again."""
        self._reserved.discard(name)

    def install(self, request: ComponentInstallRequest) -> None:
        """Begin to install a component in the background; it is ``installing`` from now on.

        Raises:
            InstallRefused: unknown name, no url, or a malformed sha256.
            InstallInProgress: this component is being installed.
            ShuttingDown: it would be cancelled at once.
        """
        target = self._targets.get(request.name)
        if target is None:
            raise InstallRefused(f"name: expected one of {', '.join(self._targets)}")
        if not request.url:
            raise InstallRefused("url: expected the address of the component's file")
        if request.sha256 and not _SHA256.fullmatch(request.sha256.lower()):
            raise InstallRefused("sha256: expected 64 hexadecimal digits")
        if request.name in self.installing:
            raise InstallInProgress(f"{request.name} is being installed")
        if self._closed:
            raise ShuttingDown("the shim is going away")
        task = asyncio.ensure_future(self._install(target, request))
        self._installing[request.name] = task
        # Not in the task itself: cancelled before its first step it would never run.
        task.add_done_callback(lambda _: self._installing.pop(request.name))

    def refuse(self, name: str, sha256: str, version: str, reason: str) -> None:
        """Report a proved file as unfit, and do not fetch its content again.

        The component is listed as ``error`` with ``version``, which stock servers from 0.21.5
        on leave alone, until another content is installed.
        """
        self.avoid(name, sha256, reason)
        self._unfit[name] = _Unfit(version, FileIdentity.of(self._targets[name].path))
        self._log.error("component.refused", component=name, version=version, reason=reason)

    def avoid(self, name: str, sha256: str, reason: str) -> None:
        """Never install this content again."""
        self._refused[sha256] = _Refusal(reason, float("inf"))
        seen = self._seen.get(name)
        if seen is not None and seen.content.sha256 == sha256:
            self._seen[name] = evolve(seen, identity=None, refused=True)

    async def close(self) -> None:
        """Cancel what is being installed; nothing half-done stays on disk."""
        self._closed = True
        tasks = list(self._installing.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _component(self, name: str) -> Component:
        if name in self.installing:
            return Component(name, "", ComponentStatus.INSTALLING)
        target = self._targets[name]
        unfit = self._unfit.get(name)
        if unfit is not None and unfit.beside == FileIdentity.of(target.path):
            return Component(name, unfit.version, ComponentStatus.ERROR)
        return _as_component(name, await self._readers[name].read(target.installed))

    async def _install(self, target: Target, request: ComponentInstallRequest) -> None:
        name, url = target.name, shown(request.url)
        try:
            await self._bring(target, request)
        except asyncio.CancelledError:
            self._log.info("component.install_cancelled", component=name, url=url)
            raise
        except ComponentError as error:
            self._log.warning("component.not_installed", component=name, error=error)
        except Exception as error:  # noqa: BLE001 - a fault of ours: the next install may fare better
            self._log.fault("component.not_installed", error, component=name)

    async def _bring(self, target: Target, request: ComponentInstallRequest) -> None:
        """Fetch, prove and place; or find that there is nothing to do.

        Raises:
            ComponentError: why the installed file stays as it is.
        """
        wanted = request.sha256.lower()
        if wanted:
            self._check_refused(wanted)
            if await _has_content(target.installed, wanted):
                self._log.info("component.already_installed", component=target.name)
                return
        try:
            with StagedFile(target.destination) as staged:
                content = await self._get(target, request, staged)
                if content is None:
                    return
                if await _has_content(target.installed, content.sha256):
                    self._see(target, request.url, content)
                    self._log.info("component.already_installed", component=target.name)
                    return
                await self._prove_and_place(target, staged, request.url, content)
        except OSError as error:
            raise ComponentError(
                f"{target.destination} cannot be written: {error.strerror or error}"
            ) from error

    async def _get(
        self, target: Target, request: ComponentInstallRequest, staged: StagedFile
    ) -> Fetched | None:
        """Fetch the content; None if the installed file already has it."""
        known = self._still_known(target, request)
        content = await self._fetch(
            request.url, staged.path, known=known.content if known else None
        )
        if content is None:
            assert known is not None, "only a known content is not fetched"
            self._check_refused(known.content.sha256)
            self._log.debug("component.unchanged", component=target.name)
            return None
        wanted = request.sha256.lower()
        if wanted and content.sha256 != wanted:
            raise ComponentError(
                f"{shown(request.url)}: sha256 is {content.sha256}, expected {wanted}"
            )
        if content.sha256 in self._refused:
            self._see(target, request.url, content, refused=True)
        self._check_refused(content.sha256)
        return content

    async def _prove_and_place(
        self, target: Target, staged: StagedFile, url: str, content: Fetched
    ) -> None:
        try:
            version = await read_version(self._run, staged.path, target.name, timeout=PATIENT)
        except ComponentError as error:
            # Not for ever: what fails on a host that is short of memory may be sound.
            self._refused[content.sha256] = _Refusal(str(error), self._monotonic() + REFUSED_FOR)
            self._see(target, url, content, refused=True)
            raise
        await asyncio.to_thread(staged.place)
        self._unfit.pop(target.name, None)
        self._see(target, url, content)
        self._log.info(
            "component.installed", component=target.name, version=version, sha256=content.sha256
        )

    def _see(self, target: Target, url: str, content: Fetched, *, refused: bool = False) -> None:
        identity = None if refused else FileIdentity.of(target.installed)
        self._seen[target.name] = _Seen(url, content, identity, refused)

    def _still_known(self, target: Target, request: ComponentInstallRequest) -> _Seen | None:
        """Return the content last seen at this URL, if fetching it again would change nothing."""
        seen = self._seen.get(target.name)
        if seen is None or seen.url != request.url:
            return None
        if request.sha256 and request.sha256.lower() != seen.content.sha256:
            return None
        if seen.refused:
            return seen if self._is_refused(seen.content.sha256) else None
        return seen if seen.identity == FileIdentity.of(target.installed) else None

    def _is_refused(self, sha256: str) -> bool:
        refusal = self._refused.get(sha256)
        if refusal is not None and self._monotonic() >= refusal.until:
            del self._refused[sha256]
            return False
        return refusal is not None

    def _check_refused(self, sha256: str) -> None:
        if self._is_refused(sha256):
            raise ComponentError(f"refused before: {self._refused[sha256].reason}")


def _unlink(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def _as_component(name: str, file: ProgramFile | None) -> Component:
    if file is None:
        return Component(name, "", ComponentStatus.NOT_INSTALLED)
    status = ComponentStatus.INSTALLED if file.version else ComponentStatus.ERROR
    if name != SHIM:
        return Component(name, file.version, status)
    if not file.lists_features:
        return FeaturelessComponent(name, file.version, status)
    return Component(name, file.version, status, file.features)


async def _has_content(path: Path, sha256: str) -> bool:
    """Tell whether a file can be executed and has this content."""

    def has() -> bool:
        try:
            return os.access(path, os.X_OK) and file_digest(path) == sha256
        except OSError:
            return False

    return await asyncio.to_thread(has)
