"""How a task becomes a container on this host: the installed runner, the flags, the devices."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from dstack_shim.engine.container import (
    ContainerSettings,
    container_spec,
    lacks_display,
    without_display,
)
from dstack_shim.engine.protocol import ContainerSpec, Engine
from dstack_shim.engine.reference import parse_reference
from dstack_shim.errors import StartFailed
from dstack_shim.tasks.task import Task


class Recipe:
    """Makes container specs; see :class:`dstack_shim.tasks.start.Recipe`."""

    def __init__(
        self,
        settings: ContainerSettings,
        engine: Engine,
        runner_version: Callable[[], Awaitable[str]],
        runner_dir: Callable[[str], Path],
    ) -> None:
        self.runner_port = settings.runner_flags.http_port
        self._settings = settings
        self._engine = engine
        self._runner_version = runner_version
        self._runner_dir = runner_dir

    async def specify(self, task: Task) -> ContainerSpec:
        """The whole container for ``task``.

        Raises ``ComponentError`` for a runner that is missing or too old, ``ResourceError``.
        """
        return container_spec(
            task.record.config,
            self._settings,
            runner_version=await self._runner_version(),
            runner_dir=str(self._runner_dir(task.dir or task.container_name)),
            gpus=task.record.gpus or (),
        )

    def retry(self, spec: ContainerSpec, error: StartFailed) -> ContainerSpec | None:
        """The same without the display part, where the NVIDIA driver lacks it."""
        return without_display(spec) if lacks_display(spec, str(error)) else None

    async def must_pull(self, image: str) -> bool:
        """Whether the image has to be fetched: it is not here, or it is ``latest``.

        Raises ``PullFailed`` for what is no image reference.
        """
        return parse_reference(image).moves or not await self._engine.has_image(image)
