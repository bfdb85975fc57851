"""What the cases share: the shim under test, its instance, its engine, and the clean-up.

    ./dev conformance -- --shim PATH_TO_EXECUTABLE [pytest's own arguments, e.g. -m "not beyond"]

One engine for the run; one shim process for a module where a case does not need its own. After
each case its tasks are terminated and removed, and what a broken shim left is swept away, so that
one fault does not fail its neighbours.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import docker
import httpx
import pytest

from tests.conformance import disks
from tests.conformance.deadlines import Deadlines, Endless
from tests.conformance.engine import Wire
from tests.conformance.images import Images
from tests.conformance.instance import VOLUMES, Instance, command, mounts_below
from tests.conformance.old_layouts import OldTask, make_old_task
from tests.conformance.pulls import Stream, layer, scripted
from tests.conformance.rows import cited_by, is_beyond
from tests.conformance.sample import SAMPLE
from tests.conformance.secrets import Watch, watching
from tests.conformance.shim import Setting, Shim, Task
from tests.conformance.table import Table
from tests.conformance.web import Web
from tests.eventually import eventually
from tests.lab import sandbox
from tests.lab.engine import PrivateEngine
from tests.lab.images import write_runner

TASK_LABEL = "ai.dstack.shim.is-task=true"
RUNNER_VERSION = "0.22.5"

# The address of an engine to use instead of starting one: a run inside a run (test_faults).
BORROWED_ENGINE = "DSTACK_CONFORMANCE_ENGINE"

# Every item of the run before any was deselected: the suite's own tests look at all cases.
COLLECTED = pytest.StashKey[tuple[pytest.Item, ...]]()

MakeShim = Callable[..., Shim]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shim", help="the shim executable to judge")
    parser.addoption(
        "--sample", action="store_true", help="a few cases of each section (see sample.py)"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "rows(*ids): rows of docs/protocol.md that a case checks")
    config.addinivalue_line("markers", "beyond: a rule a stock shim may break on purpose")
    config.addinivalue_line(
        "markers", "last(order): runs after all others, by when everything else has happened"
    )
    config.pluginmanager.register(Table(), "conformance-table")


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[COLLECTED] = tuple(items)
    for item in items:
        if is_beyond(cited_by(item)):
            item.add_marker(pytest.mark.beyond)
    if config.getoption("--sample"):
        _keep(config, items, [item for item in items if not cited_by(item) or _is_sample(item)])
    items.sort(key=_place_at_the_end)


def _keep(config: pytest.Config, items: list[pytest.Item], kept: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _is_sample(item: pytest.Item) -> bool:
    return getattr(item, "originalname", item.name) in SAMPLE.get(item.path.name, ())


def _place_at_the_end(item: pytest.Item) -> int:
    mark = item.get_closest_marker("last")
    return int(mark.args[0]) if mark else 0


@pytest.fixture(scope="session")
def executable(request: pytest.FixtureRequest) -> Path:
    given = request.config.getoption("--shim")
    if not given:
        pytest.skip("no --shim PATH given: nothing to judge")
    return Path(os.environ.get("DEV_CALLER_DIR", "."), given).resolve(strict=True)


@pytest.fixture(scope="session")
def instance(executable: Path, tmp_path_factory: pytest.TempPathFactory) -> Instance:
    if not sandbox.inside():
        pytest.skip("not inside the sandbox: ./dev conformance -- --shim PATH")
    # Jobs and other users must be able to walk to what lies below.
    root = tmp_path_factory.mktemp("instance")
    for folder in (root, root.parent, root.parent.parent):
        folder.chmod(0o755)
    return Instance(root)


@dataclass
class _Borrowed:
    """Somebody else's engine, as far as cases look at it."""

    address: str

    @property
    def socket(self) -> Path:
        return Path(self.address.removeprefix("unix://"))

    @property
    def directory(self) -> Path:
        return Path(tempfile.mkdtemp(prefix="b", dir="/run/lab"))


@pytest.fixture(scope="session")
def private_engine(instance: Instance) -> Iterator[PrivateEngine]:
    if address := os.environ.get(BORROWED_ENGINE):
        yield cast("PrivateEngine", _Borrowed(address))
        return
    engine = PrivateEngine()
    engine.start()
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def engine(private_engine: PrivateEngine) -> Iterator[docker.DockerClient]:
    client = docker.DockerClient(base_url=private_engine.address, timeout=60)
    yield client
    client.close()


@pytest.fixture(scope="session")
def wire(private_engine: PrivateEngine, watch: Watch) -> Iterator[Wire]:
    """The engine's socket as the shim under test is given it."""
    socket = Wire(private_engine.directory / "wire", private_engine.socket, told=watch.told)
    yield socket
    socket.close()


@pytest.fixture(scope="session")
def watch(instance: Instance) -> Iterator[Watch]:
    """Looks for credentials beside all cases; the last one asks it what it saw."""
    # A registry keeps its user's name; images of disks are big, and no shim's.
    with watching(Watch(instance.root, leave_out=["registry", disks.FOLDER])) as made:
        yield made


@pytest.fixture(scope="session")
def images(engine: docker.DockerClient) -> Images:
    return Images(engine)


@pytest.fixture(scope="session")
def web() -> Iterator[Web]:
    server = Web()
    yield server
    server.close()


@dataclass
class SilentPull:
    """A pull that is silent from the start of the run, beside all other cases."""

    task: Task
    stream: Stream
    since: float

    def wait_out(self, seconds: float = 65.0) -> None:
        """Wait until it has been silent longer than an HTTP client's usual minute."""
        left = self.since + seconds - time.monotonic()
        threading.Event().wait(max(left, 0))


@pytest.fixture(scope="session", autouse=True)
def silent_pull(request: pytest.FixtureRequest) -> Iterator[SilentPull | None]:
    if not _is_wanted(request, "silent_pull"):
        yield None
        return
    instance, setting, images, engine = map(
        request.getfixturevalue, ("instance", "setting", "images", "engine")
    )
    engine.images.get(images.idle).tag("conformance/silent", "latest")
    # A socket of its own: what cases count and break on theirs is not about this one.
    wire = request.getfixturevalue("wire").another("silent")
    shim = _maker(instance, dataclasses.replace(setting, engine=wire.url), [])()
    with scripted(wire) as stream:
        task = shim.submit("conformance/silent:latest").reach("pulling")
        stream.say(layer("one", "Downloading", current=1, total=2))
        yield SilentPull(task, stream, time.monotonic())
    _finish_tasks(shim)
    shim.close()
    wire.close()


@pytest.fixture(scope="session", autouse=True)
def deadlines(request: pytest.FixtureRequest) -> Iterator[Deadlines | None]:
    """A pull and an install without end, from the start of the run."""
    if not _is_wanted(request, "deadlines"):
        yield None
        return
    instance, setting, wire, web = map(
        request.getfixturevalue, ("instance", "setting", "wire", "web")
    )
    pull, install = Endless(), Endless()
    runner = instance.root / "deadlines" / "dstack-runner"
    runner.parent.mkdir()
    write_runner(runner, RUNNER_VERSION)
    wire = wire.another("deadlines")
    own = dataclasses.replace(setting, engine=wire.url)
    shim = _maker(instance, own, [])(f"--runner-binary-path={runner}")
    with wire.rule("POST", "^/images/create", pull.pull):
        task = shim.submit("conformance/endless:latest").reach("pulling")
        body = {"name": "dstack-runner", "url": web.serve("/endless", install.download)}
        assert shim.post("/api/components/install", body).status_code == 200
        yield Deadlines(shim, task, pull, install)
        pull.close()
        install.close()
    _finish_tasks(shim)
    shim.close()
    wire.close()


def _is_wanted(request: pytest.FixtureRequest, name: str) -> bool:
    """Whether a case that was chosen asks for this by name."""
    return any(
        isinstance(item, pytest.Function) and name in inspect.signature(item.function).parameters
        for item in request.session.items
    )


@pytest.fixture(scope="session")
def setting(executable: Path, instance: Instance, wire: Wire) -> Setting:
    runner = write_runner(instance.root / "dstack-runner", RUNNER_VERSION)
    return Setting(executable, instance.path, wire.url, runner)


_homes = itertools.count(1)


def _maker(instance: Instance, setting: Setting, made: list[Shim]) -> MakeShim:
    def make(
        *arguments: str, start: bool = True, home: Path | None = None, **options: Any
    ) -> Shim:
        place = home or instance.root / f"shim-{next(_homes)}" / ".dstack"
        shim = Shim(setting, place, *arguments, **options)
        made.append(shim)
        return shim.start() if start else shim

    return make


@pytest.fixture(scope="module")
def module_shims(instance: Instance, setting: Setting) -> Iterator[MakeShim]:
    made: list[Shim] = []
    yield _maker(instance, setting, made)
    for shim in made:
        shim.close()


@pytest.fixture(scope="module")
def settled_shim(module_shims: MakeShim) -> Shim:
    return module_shims()


@pytest.fixture
def shim(settled_shim: Shim, clean: None) -> Shim:
    """A running shim that the cases of a module share, knowing no task."""
    if not settled_shim.alive:
        settled_shim.start()
    if settled_shim.task_list():  # a case before left it with something it does not let go of
        settled_shim.kill()
        shutil.rmtree(settled_shim.home)
        settled_shim.home.mkdir()
        settled_shim.start()
    return settled_shim


@pytest.fixture
def new_shim(
    instance: Instance, setting: Setting, watch: Watch, clean: None
) -> Iterator[MakeShim]:
    """Makes shims of the case's own, each on a new home, started unless told otherwise."""
    made: list[Shim] = []
    yield _maker(instance, setting, made)
    watch.look()
    for shim in made:
        _finish_tasks(shim)
        shim.close()
    watch.look()
    for shim in made:
        shutil.rmtree(shim.home.parent, ignore_errors=True)


@pytest.fixture
def clean(
    engine: docker.DockerClient, request: pytest.FixtureRequest, watch: Watch
) -> Iterator[None]:
    """Whatever the case did: its tasks end and go, and nothing of them is left."""
    yield
    watch.look()
    for name in ("settled_shim",):
        if name in request.fixturenames:
            _finish_tasks(request.getfixturevalue(name))
    eventually(lambda: _swept(engine), within=15, saying="no container of a task is left")
    for point in reversed(mounts_below(VOLUMES)):
        command("umount", "--lazy", point)


def _swept(engine: docker.DockerClient) -> bool:
    """Remove what is left; a start in flight may bring one more, so: True once none was left."""
    left = engine.containers.list(all=True, filters={"label": TASK_LABEL}, ignore_removed=True)
    for container in left:
        with contextlib.suppress(docker.errors.APIError):  # being removed already
            container.remove(force=True, v=True)
    return not left


def _finish_tasks(shim: Shim) -> None:
    for task in shim.tasks:
        try:
            if shim.alive and task.get().status_code == 200:
                task.terminate()
                task.remove()
        except httpx.HTTPError:  # a broken or ended shim: swept by hand below
            continue
    shim.tasks.clear()


@pytest.fixture
def old_task(engine: docker.DockerClient) -> Callable[..., OldTask]:
    """Makes a running task as a release before 0.21.4 left it."""
    return functools.partial(make_old_task, engine)


@pytest.fixture
def container_of(engine: docker.DockerClient) -> Callable[[Any], Any]:
    """The container of a task, by the name the page prescribes."""
    return lambda task: engine.containers.get(task.container_name)
