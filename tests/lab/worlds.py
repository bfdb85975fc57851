"""One way for a test to arrange things on a real engine and on the fake: images, registry, host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import attrs
import docker

from dstack_shim.engine.docker import DockerEngine
from dstack_shim.engine.protocol import (
    LABEL_HOME,
    LABEL_IS_TASK,
    LABEL_TASK_ID,
    Container,
    ContainerSpec,
    Credentials,
    Engine,
    PortBinding,
)
from dstack_shim.errors import EngineUnreachable
from tests.lab.fake_engine import FakeEngine, Program, RemoteImage
from tests.lab.images import Images
from tests.lab.proxy import CountingProxy
from tests.lab.registry import Registry

RUNS_ON = Program(after=None)
LOGIN = Credentials("alice", "s3cret-of-alice")


class World(Protocol):
    """An engine and the means to change what is around it."""

    @property
    def engine(self) -> Engine:
        """The engine itself."""

    @property
    def has_registry(self) -> bool:
        """Whether images can be pulled here."""

    def image(self, program: Program) -> str:
        """An image here, whose containers do that."""

    def remote_image(self, name: str, program: Program, *, needs_login: bool = False) -> str:
        """An image in the registry and not here; its reference with the tag ``1``."""

    def remote_name(self, name: str) -> str:
        """The reference of an image that may not be in the registry."""

    def pause(self, container_id: str) -> None:
        """Pause by hand."""

    def delete(self, container_id: str) -> None:
        """Remove by hand."""

    def break_streams(self) -> None:
        """Whatever is being streamed breaks off."""

    def cut_off(self) -> Engine:
        """An engine that cannot be reached."""


class FakeWorld:
    """The fake engine; its host has every path but those below ``/no``."""

    has_registry = True

    def __init__(self) -> None:
        self.engine = FakeEngine(seed=1, has_path=lambda path: not path.startswith("/no"))

    def image(self, program: Program) -> str:
        name = f"job:{len(self.engine.images)}"
        self.engine.images[name] = program
        return name

    def remote_image(self, name: str, program: Program, *, needs_login: bool = False) -> str:
        reference = self.remote_name(name)
        image = RemoteImage(program, layers=(4000, 1000), login=LOGIN if needs_login else None)
        self.engine.registry[reference] = image
        return reference

    def remote_name(self, name: str) -> str:
        return f"127.0.0.1:5000/{name}:1"

    def pause(self, container_id: str) -> None:
        self.engine.pause(container_id)

    def delete(self, container_id: str) -> None:
        self.engine.delete(container_id)

    def break_streams(self) -> None:
        self.engine.end_streams(EngineUnreachable("no answer from the engine: Connection reset"))

    def cut_off(self) -> Engine:
        self.engine.is_unreachable = True
        return self.engine


@attrs.define
class RealWorld:
    """A private engine behind a proxy, and a registry if the machine has the program."""

    engine: Engine
    proxy: CountingProxy
    client: docker.APIClient
    images: Images
    open_registry: Registry | None
    locked_registry: Registry | None

    @property
    def has_registry(self) -> bool:
        return self.open_registry is not None

    def image(self, program: Program) -> str:
        return self.images.job(script_of(program))

    def remote_image(self, name: str, program: Program, *, needs_login: bool = False) -> str:
        registry = self.locked_registry if needs_login else self.open_registry
        assert registry is not None
        login = LOGIN if needs_login else None
        # Content of its own, and gone here: what an engine has it does not pull.
        local = self.images.plain(
            f"to-push/{name}:1", environment={"LAB_JOB": script_of(program)}, padding=100_000
        )
        reference = registry.push(self.client, local, f"{name}:1", login)
        self.client.remove_image(local)
        return reference

    def remote_name(self, name: str) -> str:
        assert self.open_registry is not None
        return f"{self.open_registry.host}/{name}:1"

    def pause(self, container_id: str) -> None:
        self.client.pause(container_id)

    def delete(self, container_id: str) -> None:
        self.client.remove_container(container_id, force=True)

    def break_streams(self) -> None:
        self.proxy.drop()

    def cut_off(self) -> Engine:
        return DockerEngine({"DOCKER_HOST": "unix:///run/lab/nobody-listens"})


def script_of(program: Program) -> str:
    """The shell that does what the program says."""
    words = [f"echo '{line}'" for line in program.lines]
    if program.on_term is not None:
        words.insert(0, f"trap 'exit {program.on_term}' TERM")  # before it says that it listens
    if program.after is None:
        # In the background, or a trap would wait for the sleep to end.
        words.append("while true; do sleep 3600 & wait $!; done")
    else:
        words += [f"sleep {program.after}"] * (program.after > 0) + [f"exit {program.code}"]
    return "; ".join(words)


def job_spec(
    image: str,
    name: str = "job-1",
    *,
    task_id: str = "task-1",
    labels: Mapping[str, str] | None = None,
    network_mode: str = "host",
    ports: tuple[PortBinding, ...] = (),
) -> ContainerSpec:
    """A container of a task that runs its image's job directly, as process 1."""
    return ContainerSpec(
        name=name,
        image=image,
        labels={
            LABEL_IS_TASK: "true",
            LABEL_TASK_ID: task_id,
            LABEL_HOME: "/home/of/shim",
            **(labels or {}),
        },
        entrypoint=("/bin/sh", "-c"),
        command=('eval "$LAB_JOB"',),
        network_mode=network_mode,
        ports=ports,
    )


async def listed(engine: Engine, container_id: str) -> Container | None:
    """The container as the list tells it, None if it does not."""
    found = [item for item in await engine.list_task_containers() if item.id == container_id]
    return found[0] if found else None


async def run(world: World, program: Program, name: str = "job-1") -> str:
    """A container of a task that runs the program; its id."""
    container_id = await world.engine.create(job_spec(world.image(program), name))
    await world.engine.start(container_id)
    return container_id
