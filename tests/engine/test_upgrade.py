"""Replaced in place on a real engine: nobody refused, no task touched, whatever the new file is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import attrs
import docker
import pytest
from dstack_shim_contracts.api import (
    SHIM,
    ComponentInstallRequest,
    ComponentStatus,
    ShutdownRequest,
    TaskConfig,
)
from dstack_shim_contracts.errors import ShimResponseError, ShutdownRefused
from dstack_shim_contracts.statuses import TaskStatus

from tests.eventually import eventually
from tests.lab.engine import PrivateEngine
from tests.lab.host import Host
from tests.lab.images import Images, write_runner
from tests.lab.proxy import CountingProxy, Hang
from tests.lab.shim import EXECUTABLE, PORT
from tests.lab.shim_files import WHEN_CHECKED, WHEN_TAKING_OVER, foreign, variant
from tests.lab.site import Site, digest
from tests.lab.traffic import Traffic
from tests.releases import environments
from tests.releases.running import run_inside
from tests.shim.file_server import FileServer, Reply, serving
from tools.build_shim import build_shim

OLD, NEW = "0.22.5", "0.22.5.post1"
STOCK = ("0.21.2", "0.22.5")
SERVER_PATIENCE = 9.0  # s for each call, in every release
HASTY = "takeover.READY_WITHIN, takeover.ALARM_AFTER, upgrade.CHECK_LIMIT = 3.0, 1, 3.0"
"""Makes a shim that waits less for its successor: what it does then is the same."""


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = os.environ.get(EXECUTABLE)
    return Path(named) if named else build_shim(OLD, tmp_path_factory.mktemp("dist"))


@pytest.fixture(autouse=True)
def runner() -> Path:
    return write_runner(Path("/usr/local/bin/dstack-runner"))


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setenv("no_proxy", "*")
    with serving() as server:
        yield server


Make = Callable[..., Site]


@pytest.fixture
def make_site(tmp_path: Path, private_engine: PrivateEngine, files: FileServer) -> Iterator[Make]:
    made: list[Site] = []

    def make(content: bytes, **more: object) -> Site:
        made.append(Site(tmp_path, private_engine, content, files, **more))  # type: ignore[arg-type]
        made[-1].start()
        return made[-1]

    yield make
    for site in made:
        site.close()


@pytest.fixture
def site(make_site: Make, built: Path) -> Site:
    return make_site(built.read_bytes())


def pids(client: docker.APIClient) -> dict[str, int]:
    """Container → process of its job."""
    return {
        box["Id"]: client.inspect_container(box["Id"])["State"]["Pid"]
        for box in client.containers()
    }


def descriptors(pid: int) -> tuple[int, int]:
    """How many sockets are open, and how many others."""
    kinds = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            kinds.append(str(entry.readlink()).startswith("socket:"))
    return kinds.count(True), kinds.count(False)


def has_copied_itself(site: Site) -> bool:
    """Whether nothing is left to do after a replacement."""
    kept = site.path.with_name(f".{SHIM}.running")
    if not kept.exists():
        return False
    copy, path = kept.stat(), site.path.stat()
    return (copy.st_size, copy.st_mtime_ns) == (path.st_size, path.st_mtime_ns)


def in_place(site: Site) -> set[str]:
    """The files at and beside the path, without the copy of what runs."""
    return {path.name for path in site.path.parent.iterdir()} - {f".{SHIM}.running"}


def children(pid: int) -> list[str]:
    found = subprocess.run(
        ["ps", "--no-headers", "-o", "pid,stat,args", "--ppid", str(pid)],
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.splitlines()


@pytest.mark.slow
def test_twenty_replacements_under_load_refuse_nobody_and_touch_no_task(
    site: Site, built: Path, images: Images, client: docker.APIClient, full_counts: bool
) -> None:
    """The promise of a replacement, with real clients and a real ``execve``."""
    tasks = [f"t{number}" for number in range(8)]
    for task_id in tasks:
        site.run_task(task_id, images)
    before, pid = pids(client), site.pid
    site.upgrade(variant(built, "0.22.5.post0"))
    site.wait_for_version("0.22.5.post0")
    eventually(lambda: has_copied_itself(site))
    sockets, others = descriptors(pid)
    rounds = 200 if full_counts else 20
    with Traffic(rate=200, expect=dict.fromkeys(tasks, "running")) as traffic:
        for number in range(1, rounds + 1):
            version = f"0.22.5.post{number}"
            site.upgrade(variant(built, version))
            site.wait_for_version(version)
    assert traffic.problems == []
    assert traffic.answered > 100 * rounds
    # How long it is on a quiet machine is for the benchmarks to say; here, that no server gives up.
    assert traffic.longest < SERVER_PATIENCE
    assert (site.pid, site.supervisor.runs) == (pid, [])
    assert pids(client) == before
    answer = site.client.healthcheck()
    assert answer.implementation is not None
    assert answer.implementation.generation == rounds + 1
    eventually(lambda: has_copied_itself(site))

    def nothing_was_left_open() -> bool:
        now = descriptors(pid)
        # Connections to the engine are kept for a while: two more or less, not one a replacement.
        return now[1] == others and now[0] <= sockets + 2

    eventually(nothing_was_left_open, saying="it is idle again")
    assert children(pid) == []
    names = {f".{SHIM}.previous", f".{SHIM}.running"}
    assert {path.name for path in site.path.parent.iterdir()} == {SHIM, *names}


def test_a_replacement_keeps_pid_port_and_tasks_and_says_what_it_did(
    site: Site, built: Path, images: Images
) -> None:
    site.run_task("t1", images)
    content, pid = variant(built, NEW), site.pid
    entry = site.install(content)
    assert (entry.version, entry.status) == (NEW, ComponentStatus.INSTALLED)
    assert entry.features == site.client.healthcheck().features
    assert digest(site.path.read_bytes()) == digest(built.read_bytes())
    site.client.shutdown()
    answer = site.wait_for_version(NEW)
    assert answer.implementation is not None
    last = answer.implementation.last_upgrade
    assert last is not None
    assert (last.from_version, last.to_version, last.outcome) == (OLD, NEW, "done")
    assert (answer.implementation.generation, answer.implementation.uptime) == (1, 0)
    assert site.pid == pid
    assert site.client.task("t1").status is TaskStatus.RUNNING
    assert site.path.read_bytes() == content
    assert site.previous.read_bytes() == built.read_bytes()
    assert not site.waiting.exists()
    assert site.component().version == NEW
    site.supervisor.kill(signal.SIGTERM)
    assert site.supervisor.wait_for_end(pid).status == 0
    site.wait_for_version(NEW)
    assert site.state()["last"]["outcome"] == "done"


def test_gpus_are_handed_over_and_not_looked_for_again(
    instance: Host, make_site: Make, built: Path
) -> None:
    """On some hosts their tool comes as an image and takes minutes."""
    instance.gpus("GPU-1", "GPU-2")
    asked = instance.tools / "asked"
    instance.tool("nvidia-smi", f"echo >>{asked}; echo 'NVIDIA L4, 23034, GPU-1, 570.86.15'")
    site = make_site(
        built.read_bytes(), environ={"PATH": f"{instance.tools}:{os.environ['PATH']}"}
    )
    before, times = site.client.instance_info(), asked.read_text()
    assert before.gpu_vendor == "nvidia"
    site.upgrade(variant(built, NEW))
    site.wait_for_version(NEW)
    assert (site.client.instance_info(), asked.read_text()) == (before, times)


def test_a_pulling_task_is_in_the_way_of_a_guarded_shutdown_and_ends_with_its_step_otherwise(
    make_site: Make, built: Path, proxy: CountingProxy
) -> None:
    proxy.spoil(Hang(), path="/images/create")
    site = make_site(built.read_bytes(), environ={"DOCKER_HOST": proxy.address})
    site.client.submit(TaskConfig(id="t1", name="t1-0-0", image_name="never/arrives:1"))
    eventually(lambda: site.client.task("t1").status is TaskStatus.PULLING)
    site.install(variant(built, NEW))
    with pytest.raises(ShutdownRefused) as refused:
        site.client.shutdown(ShutdownRequest(only_if_safe=True))
    (obstacle,) = refused.value.refusal.in_the_way
    assert (obstacle.kind, obstacle.id, obstacle.status) == ("task", "t1", "pulling")
    site.client.submit(TaskConfig(id="t2", name="t2-0-0", image_name="never/arrives:2"))
    with Traffic(rate=50, paths=("/api/tasks/t1", "/api/tasks/t2")) as traffic:
        site.client.shutdown()
        site.wait_for_version(NEW)
    assert traffic.problems == []  # no 404
    for task_id in ("t1", "t2"):
        info = site.client.task(task_id)
        assert (info.status, info.termination_reason) == (
            TaskStatus.TERMINATED,
            "executor_error",
        )
        assert info.termination_message


def test_a_guarded_shutdown_of_running_tasks_is_a_replacement(
    site: Site, built: Path, images: Images
) -> None:
    site.run_task("t1", images)
    site.install(variant(built, NEW))
    site.client.shutdown(ShutdownRequest(only_if_safe=True))
    site.wait_for_version(NEW)


def test_a_target_that_keeps_no_state_is_in_the_way_of_a_guarded_shutdown(
    site: Site, images: Images
) -> None:
    site.run_task("t1", images)
    site.install(foreign("0.21.2"))
    with pytest.raises(ShutdownRefused) as refused:
        site.client.shutdown(ShutdownRequest(only_if_safe=True))
    assert [one.kind for one in refused.value.refusal.in_the_way] == ["task", "target"]


def test_submits_are_refused_from_the_shutdown_on_and_taken_again_when_it_is_given_up(
    site: Site, built: Path, images: Images, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    slow = WHEN_CHECKED + f"{{ until [ -e {go} ]; do sleep 0.05; done; exit 7; }}"
    site.upgrade(variant(built, NEW, shell=slow))
    config = TaskConfig(id="t1", name="t1-0-0", image_name="job:none")
    with pytest.raises(ShimResponseError) as refused:
        site.client.submit(config)
    assert refused.value.status == 503
    assert site.client.tasks() == ()
    site.client.shutdown()  # ignored while one is under way
    go.touch()
    site.wait_for_outcome("refused")
    site.run_task("t1", images)


def test_a_forced_shutdown_does_not_wait_for_a_check(site: Site, built: Path) -> None:
    pid = site.pid
    site.upgrade(variant(built, NEW, shell=WHEN_CHECKED + "exec sleep 600"))
    site.client.shutdown(ShutdownRequest(force=True))
    assert site.supervisor.wait_for_end(pid).status == 0
    assert site.wait_until_it_answers().version == OLD


DEPLOYMENT = (
    "dlpath=$(mktemp -t dstack-shim.XXXXXX) && "
    'curl -sS --compressed --output "$dlpath" "$URL" && '
    'mv "$dlpath" /usr/local/bin/dstack-shim && chmod +x /usr/local/bin/dstack-shim'
)
LOOP = "while true; do dstack-shim; sleep 3; done"


def test_deployed_as_servers_do_it_is_replaced_within_the_loop_of_cloud_machines(
    private_engine: PrivateEngine, files: FileServer, built: Path, images: Images, tmp_path: Path
) -> None:
    """What is started there has one name, one set of variables, and nobody who knows more."""
    site = Site(tmp_path, private_engine, b"", files)
    site.path = Path("/usr/local/bin", SHIM)
    files.replies["/deployed"] = Reply(built.read_bytes())
    url = {"URL": files.url("/deployed"), "no_proxy": "*"}
    subprocess.run(["sh", "-c", DEPLOYMENT], env={**os.environ, **url}, check=True, timeout=60)
    assert site.path.stat().st_mode & 0o777 == 0o711
    environ = {**os.environ, **private_engine.environ, "DSTACK_SHIM_HOME": str(site.home)}
    with (tmp_path / "nohup.out").open("wb") as output:
        loop = subprocess.Popen(
            ["sh", "-c", LOOP], env=environ, stdout=output, stderr=output, start_new_session=True
        )
    try:
        site.wait_until_it_answers()
        site.run_task("t1", images)
        lock = site.home / "dstack-shim.lock"
        pid = lock.read_text()
        site.upgrade(variant(built, NEW))
        site.wait_for_version(NEW)
        assert lock.read_text() == pid
        site.upgrade(variant(built, "0.22.5.post2", takeover=0))  # over the loop's sleep of 3 s
        site.wait_for_version("0.22.5.post2")
        assert lock.read_text() != pid
        assert site.client.task("t1").status is TaskStatus.RUNNING
    finally:
        os.killpg(loop.pid, signal.SIGKILL)
        loop.wait()
        site.client.close()


# Bad files. Each leaves a shim that serves, no task touched, and a reason somebody can read.


@attrs.frozen
class Bad:
    """A file that does not even get to wait beside the path, and a word of the reason."""

    reply: Callable[[bytes], Reply]
    word: str


NOT_INSTALLED = {
    "403": Bad(lambda _: Reply(b"<Error>AccessDenied</Error>", 403), "403"),
    "empty": Bad(lambda _: Reply(b""), "version"),
    "truncated": Bad(lambda good: Reply(good[: len(good) // 2]), "version"),
    "another name": Bad(lambda _: Reply(b"#!/bin/sh\necho dstack-runner version 1\n"), "name"),
    "ends at once": Bad(lambda _: Reply(b"#!/bin/sh\nexit 0\n"), "version"),
}


@pytest.mark.parametrize("bad", NOT_INSTALLED)
def test_a_file_that_is_no_shim_is_never_waited_for_and_not_fetched_again(
    site: Site, built: Path, images: Images, client: docker.APIClient, bad: str
) -> None:
    site.run_task("t1", images)
    before, pid = pids(client), site.pid
    reply = NOT_INSTALLED[bad].reply(built.read_bytes())
    entry = site.install(reply)
    assert (entry.version, entry.status) == (OLD, ComponentStatus.INSTALLED)
    assert "component.not_installed" in site.log()
    assert in_place(site) == {SHIM}
    assert_not_fetched_again(site, reply)
    assert (pids(client), site.pid) == (before, pid)


def test_a_full_disk_leaves_the_old_file_and_no_rest(
    make_site: Make, built: Path, tmp_path: Path
) -> None:
    size = built.stat().st_size * 3 // 2
    (tmp_path / "bin").mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(tmp_path / "bin")], check=True
    )
    try:
        site = make_site(built.read_bytes())
        assert site.install(variant(built, NEW)).version == OLD
        assert "No space left" in site.log()
        assert in_place(site) == {SHIM}
        assert site.client.healthcheck().version == OLD
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path / "bin")], check=True)


@attrs.frozen
class Broken:
    """A file that waits beside the path and will not do: what becomes of it, and why."""

    outcome: str
    word: str
    shell: str = ""
    patch: str = ""


DIES_ONCE_READY = """\
import os
enter = daemon.Daemon._enter_service
async def enter_and_die(self):
    await enter(self)
    os._exit(3)
daemon.Daemon._enter_service = enter_and_die"""
BROKEN = {
    "its check hangs": Broken("refused", "took longer", shell=WHEN_CHECKED + "exec sleep 600"),
    "its check says nothing": Broken("refused", "report", shell=WHEN_CHECKED + "exit 0"),
    "it cannot read our records": Broken(
        "refused",
        "record of task t1",
        patch="from dstack_shim.store import Store; Store.scan = lambda self: ()",
    ),
    "it loses a task": Broken(
        "refused",
        "lose task t1",
        patch="from dstack_shim.tasks import survey; "
        "from dstack_shim.tasks.recovery import Plan; "
        "survey.Survey.plan = lambda self: Plan()",
    ),
    "it ends at once": Broken("died", "before it was ready", shell=WHEN_TAKING_OVER + "exit 0"),
    "it hangs before it can watch itself": Broken(
        "died", "before it was ready", shell=WHEN_TAKING_OVER + "exec sleep 600"
    ),
    "it does not start": Broken(
        "rolled-back",
        "boo",
        patch="async def boo(self): raise RuntimeError(boo.__name__)\n"
        "daemon.Daemon._check_components = boo",
    ),
    "it never gets ready": Broken(
        "rolled-back",
        "not ready",
        patch="import asyncio\ndaemon.Daemon._check_components = lambda self: asyncio.sleep(600)",
    ),
    "its loop hangs": Broken(
        "rolled-back",
        "not ready",
        patch="import time\ndaemon.Daemon._check_components = lambda self: time.sleep(600)",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_will_not_do_leaves_the_old_one_serving_and_is_reported_as_an_error(
    make_site: Make, built: Path, images: Images, client: docker.APIClient, name: str
) -> None:
    broken = BROKEN[name]
    old = variant(built, OLD, patch=HASTY)
    site = make_site(old)
    site.run_task("t1", images)
    before, pid = pids(client), site.pid
    content = variant(built, NEW, shell=broken.shell, patch=broken.patch)
    assert site.install(content).version == NEW
    site.client.shutdown()
    last = site.wait_for_outcome(broken.outcome)
    assert broken.word in last.reason
    assert site.client.healthcheck().version == OLD
    assert site.client.task("t1").status is TaskStatus.RUNNING
    assert pids(client) == before
    assert (site.pid == pid) is (broken.outcome != "died")
    assert site.path.read_bytes() == old
    assert not site.waiting.exists()
    entry = site.component()
    assert (entry.version, entry.status) == (NEW, ComponentStatus.ERROR)
    assert broken.word in site.log()
    assert_not_fetched_again(site, Reply(content))
    site.upgrade(variant(built, "0.22.5.post2"))
    site.wait_for_version("0.22.5.post2")
    assert pids(client) == before


def test_a_file_that_dies_again_and_again_after_it_was_ready_gives_way_to_the_one_before(
    make_site: Make, built: Path, images: Images, client: docker.APIClient
) -> None:
    old = variant(built, OLD, patch=HASTY)
    site = make_site(old)
    site.run_task("t1", images)
    before = pids(client)
    content = variant(built, NEW, patch=DIES_ONCE_READY)
    site.upgrade(content)
    last = site.wait_for_outcome("died")
    assert "twice" in last.reason
    assert site.client.healthcheck().version == OLD
    assert site.path.read_bytes() == old
    assert (site.component().version, site.component().status) == (NEW, ComponentStatus.ERROR)
    assert pids(client) == before
    assert_not_fetched_again(site, Reply(content))


def assert_not_fetched_again(site: Site, reply: Reply) -> None:
    """Servers up to 0.21.3 ask for an install at every check, whatever is reported."""
    path = site.begin_install(attrs.evolve(reply, headers={"ETag": digest(reply.body)}))
    first = site.wait_for_install()
    sent = site.files.sent.get(path, 0)
    for _ in range(3):
        site.client.install_component(ComponentInstallRequest(SHIM, site.files.url(path)))
        assert site.wait_for_install() == first
    if reply.status == 200:
        assert site.files.sent.get(path, 0) == sent


# The check loop of stock servers: 0.21.2 asks for an install whenever versions differ, 0.22.5 leaves
# a component alone that is reported as an error.


def checks_of(
    release: str, site: Site, version: str, content: bytes, checks: int
) -> list[list[str]]:
    """What a server of that release sees of the shim at each of so many checks."""
    site.files.replies["/release"] = Reply(content, headers={"ETag": digest(content)})
    seen: list[list[str]] = run_inside(
        environments.pristine(release),
        "check_components.py",
        *(str(PORT), version, site.files.url("/release"), str(checks)),
        environment={"no_proxy": "*"},
    )
    return seen


@pytest.mark.parametrize("release", STOCK)
def test_a_stock_server_installs_once_and_restarts_once(
    site: Site, built: Path, release: str
) -> None:
    content = variant(built, NEW)
    seen = checks_of(release, site, NEW, content, 6)
    assert seen[0] == [OLD, "installed"]
    assert seen[-3:] == [[NEW, "installed"]] * 3
    assert site.wait_for_version(NEW).version == NEW
    assert site.log().count("upgrade.checking") == 1
    assert site.files.sent["/release"] == len(content)


@pytest.mark.parametrize("release", STOCK)
@pytest.mark.parametrize(
    "name",
    ["its check says nothing", pytest.param("it ends at once", marks=pytest.mark.full)],
)
def test_a_stock_server_fetches_a_bad_file_once_and_restarts_into_it_once(
    site: Site, built: Path, release: str, name: str
) -> None:
    content = variant(built, NEW, shell=BROKEN[name].shell)
    seen = checks_of(release, site, NEW, content, 12)
    assert seen[-3:] == [[NEW, "error"]] * 3
    assert site.wait_for_outcome(BROKEN[name].outcome).to_version == NEW
    assert site.client.healthcheck().version == OLD
    assert site.log().count("upgrade.checking") == 1
    # Once before it was refused, and once where another process asks for it first.
    assert site.files.sent["/release"] <= 2 * len(content)


# Moving back, and files put there by hand.


def test_a_shim_that_cannot_take_over_is_put_at_the_path_for_the_supervisor(
    site: Site, built: Path
) -> None:
    pid = site.pid
    content = variant(built, NEW, takeover=0)
    site.install(content)
    site.client.shutdown()
    assert site.supervisor.wait_for_end(pid).status == 0
    site.wait_for_version(NEW)
    assert site.path.read_bytes() == content
    assert site.previous.read_bytes() == built.read_bytes()


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_path_that_was_replaced_by_hand_ends_the_process_and_what_ran_is_kept(
    site: Site, built: Path, waits: bool, in_place: bool
) -> None:
    pid = site.pid
    eventually(site.path.with_name(f".{SHIM}.running").exists)
    if in_place:  # what a link would show, too
        site.path.write_bytes(variant(built, "0.22.5.post2"))
    else:
        site.put(variant(built, "0.22.5.post2"))
    if waits:
        site.install(variant(built, NEW))
    site.client.shutdown()
    assert site.supervisor.wait_for_end(pid).status == 0
    site.wait_for_version(NEW if waits else "0.22.5.post2")
    assert site.previous.read_bytes() == built.read_bytes()


def test_a_file_that_waited_is_dropped_when_another_was_put_at_the_path(
    site: Site, built: Path
) -> None:
    site.install(variant(built, "0.22.5.post2"))
    site.put(variant(built, NEW))
    site.supervisor.kill()
    site.wait_for_version(NEW)
    assert (site.component().version, site.waiting.exists()) == (NEW, False)


def test_after_a_replacement_nothing_is_imported_any_more(
    make_site: Make, built: Path, images: Images
) -> None:
    """The file it was loaded from is gone: an import would fail, at the worst of times."""
    header = 'exec python3 -I -S -X utf8 -X importtime "$0" "$@"'
    site = make_site(built.read_bytes())
    site.upgrade(variant(built, NEW, shell=header))
    site.wait_for_version(NEW)
    site.run_task("t1", images)
    for call in (
        site.client.healthcheck,
        site.client.instance_health,
        site.client.instance_info,
        site.client.components,
        site.client.tasks,
    ):
        call()
    for path in ("/nowhere", "/metrics/tasks/t1", "/api/tasks/none"):
        with pytest.raises(ShimResponseError):
            site.client.document(path)
    with urllib.request.urlopen(f"http://localhost:{PORT}/metrics", timeout=30) as answer:
        assert answer.status == 200
    site.install(foreign("0.21.2"))
    site.client.terminate("t1")
    site.client.remove("t1")
    site.supervisor.kill(signal.SIGTERM)
    output = site.supervisor.output()
    after = output[output.rindex(f"upgrade.done version={NEW}") :]
    late = [line for line in after.splitlines() if line.startswith("import time:")]
    bundled = [line for line in late if not is_standard(line)]
    assert bundled == []


def is_standard(line: str) -> bool:
    return line.rpartition("|")[2].split(".")[0].strip() in sys.stdlib_module_names
