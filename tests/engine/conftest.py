"""A real engine for the whole run; what a test leaves on it is removed."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import docker
import pytest

from dstack_shim.engine.docker import DockerEngine
from tests.engine.patience import Patience, begun
from tests.lab import sandbox
from tests.lab.engine import PrivateEngine
from tests.lab.host import Host
from tests.lab.images import Images
from tests.lab.proxy import CountingProxy
from tests.lab.registry import Registry
from tests.lab.worlds import LOGIN, FakeWorld, RealWorld, World


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "last: runs after all others, which is what it waits for")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("last") is not None)


DEV = Path("/dev")  # the sandbox's own
GPU_NODES = frozenset(
    {"kfd", "dri", "tenstorrent", "accel", "nvidiactl", "nvidia0", "infiniband", "odd0"}
)


@pytest.fixture(scope="session")
def session_engine() -> Iterator[PrivateEngine]:
    if not sandbox.inside():
        pytest.exit(
            "tests/engine start containers and mounts: run them as\n"
            "  tests/lab/sandbox .venv/bin/python -m pytest tests/engine",
            returncode=4,
        )
    engine = PrivateEngine()
    engine.start()
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def session_client(session_engine: PrivateEngine) -> Iterator[docker.APIClient]:
    client = session_engine.client()
    yield client
    client.close()


@pytest.fixture(scope="session")
def images(session_client: docker.APIClient) -> Images:
    return Images(session_client)


@pytest.fixture(autouse=True)
def no_devices_left() -> Iterator[None]:
    """The device nodes a test has made go with it: the next shim would take them for GPUs."""
    before = {name for name in GPU_NODES if (DEV / name).exists()}
    yield
    for name in GPU_NODES - before:
        path = DEV / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@pytest.fixture
def private_engine(
    session_engine: PrivateEngine, session_client: docker.APIClient
) -> Iterator[PrivateEngine]:
    """The run's engine, empty of containers before the test and after it."""
    yield session_engine
    for container in session_client.containers(all=True):
        session_client.remove_container(container["Id"], force=True, v=True)


@pytest.fixture
def client(private_engine: PrivateEngine, session_client: docker.APIClient) -> docker.APIClient:
    """The SDK's own client, for what only a test asks an engine."""
    return session_client


@pytest.fixture
def proxy(private_engine: PrivateEngine) -> Iterator[CountingProxy]:
    with CountingProxy(private_engine.socket, private_engine.directory / "p") as proxy:
        yield proxy


@pytest.fixture
def instance(private_engine: PrivateEngine, tmp_path: Path) -> Iterator[Host]:
    """A host with disks, users and GPUs, for shims that are started on it."""
    # Users and jobs walk to what lies below.
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    host = Host(tmp_path, private_engine)
    yield host
    host.close()


@pytest.fixture(scope="session", autouse=True)
def patience(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    open_registry: Registry | None,
) -> Iterator[Patience | None]:
    """Begun before any other test if one asks for it; None without a registry."""
    wanted = any(item.get_closest_marker("last") for item in request.session.items)
    if open_registry is None or not wanted:
        yield None
        return
    with begun(tmp_path_factory.mktemp("patience"), open_registry) as patience:
        yield patience


@pytest.fixture(scope="session")
def open_registry(session_engine: PrivateEngine) -> Iterator[Registry | None]:
    """A registry on port 5000; None where the program is missing."""
    yield from _registry(Registry(session_engine.directory / "open", 5000))


@pytest.fixture(scope="session")
def locked_registry(session_engine: PrivateEngine) -> Iterator[Registry | None]:
    """A registry on port 5001 that asks for a password."""
    yield from _registry(Registry(session_engine.directory / "locked", 5001, LOGIN))


def _registry(registry: Registry) -> Iterator[Registry | None]:
    if not registry.is_installed():
        yield None
        return
    registry.start()
    yield registry
    registry.stop()


@pytest.fixture(params=["real", "fake"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """A real engine, and the fake; what a test asks of it, it asks of both."""
    if request.param == "fake":
        yield FakeWorld()
        return
    proxy = request.getfixturevalue("proxy")
    engine = DockerEngine({"DOCKER_HOST": proxy.address})
    yield RealWorld(
        engine,
        proxy,
        request.getfixturevalue("client"),
        request.getfixturevalue("images"),
        request.getfixturevalue("open_registry"),
        request.getfixturevalue("locked_registry"),
    )
    await engine.close()
