"""Component list and install: real files, a real HTTP server, real program runs."""

from __future__ import annotations

import asyncio
import hashlib
import json
import stat
import threading
import zipfile
from collections.abc import AsyncIterator, Iterator
from io import BytesIO
from pathlib import Path

import pytest
from dstack_shim_contracts.api import (
    RUNNER,
    SHIM,
    Component,
    ComponentInstallRequest,
    ComponentStatus,
)
from dstack_shim_contracts.codec import encode
from dstack_shim_contracts.gate import decide
from dstack_shim_contracts.statuses import TaskStatus

from dstack_shim import components as components_module
from dstack_shim.components import InstalledComponents, Target
from dstack_shim.download import Fetched
from dstack_shim.errors import (
    ComponentError,
    InstallInProgress,
    InstallRefused,
    ShuttingDown,
    StartupError,
)
from dstack_shim.host.commands import run
from dstack_shim.installed import FileIdentity
from dstack_shim.log import event_log
from tests.eventually import eventually_async
from tests.shim.file_server import FileServer, Reply, serving

RUNNER_1 = b"#!/bin/sh\necho dstack-runner version 1.0\n"
RUNNER_2 = b"#!/bin/sh\necho dstack-runner version 2.0\n"


def shim(
    version: str, features: tuple[str, ...] = ("persisted-state",), takeover: int = 0
) -> bytes:
    """Our single-file build in small."""
    raw = BytesIO()
    raw.write(f"#!/bin/sh\necho dstack-shim version {version}\nexit\n".encode())
    document = {
        "name": SHIM,
        "version": version,
        "features": features,
        "implementation": {"name": "ours", "version": "1"},
        "takeover": takeover,
    }
    with zipfile.ZipFile(raw, "a") as archive:
        archive.writestr(zipfile.ZipInfo("dstack-shim.json"), json.dumps(document))
    return raw.getvalue()


def put(path: Path, content: bytes, mode: int = 0o755) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setenv("no_proxy", "*")
    with serving() as server:
        yield server


@pytest.fixture
def bin_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "bin"
    directory.mkdir()
    return directory


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def installed(bin_dir: Path, clock: Clock) -> AsyncIterator[InstalledComponents]:
    targets = (Target(RUNNER, bin_dir / RUNNER), Target(SHIM, bin_dir / SHIM))
    components = InstalledComponents(targets, run, event_log(), monotonic=clock)
    yield components
    await components.close()


async def listed(components: InstalledComponents, name: str = RUNNER) -> Component:
    return next(c for c in (await components.list()).components if c.name == name)


async def install(components: InstalledComponents, url: str, **fields: str) -> Component:
    """Install and wait for the end, whatever it is."""
    components.install(ComponentInstallRequest(**{"name": RUNNER, **fields}, url=url))
    name = fields.get("name", RUNNER)
    assert await listed(components, name) == Component(name, "", ComponentStatus.INSTALLING)

    async def over() -> bool:
        return (await listed(components, name)).status is not ComponentStatus.INSTALLING

    await eventually_async(over, within=30)
    return await listed(components, name)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# --- the list


async def test_missing_components_are_listed_in_order(installed: InstalledComponents) -> None:
    assert (await installed.list()).components == (
        Component(RUNNER, "", ComponentStatus.NOT_INSTALLED),
        Component(SHIM, "", ComponentStatus.NOT_INSTALLED),
    )


async def test_shim_is_listed_with_the_features_of_the_file_and_the_runner_without(
    installed: InstalledComponents, bin_dir: Path
) -> None:
    put(bin_dir / RUNNER, RUNNER_1)
    put(bin_dir / SHIM, shim("0.22.5"), mode=0o711)

    assert (await installed.list()).components == (
        Component(RUNNER, "1.0", ComponentStatus.INSTALLED),
        Component(SHIM, "0.22.5", ComponentStatus.INSTALLED, ("persisted-state",)),
    )


async def test_dstacks_own_shim_lists_no_features_and_is_judged_by_its_version(
    installed: InstalledComponents, bin_dir: Path
) -> None:
    put(bin_dir / SHIM, b"#!/bin/sh\necho dstack-shim version 0.22.5\n")

    entry = json.loads(encode(await listed(installed, SHIM)))
    assert entry == {"name": SHIM, "version": "0.22.5", "status": "installed"}
    running = {"service": SHIM, "version": "0.22.5", "features": ["persisted-state"]}
    assert TaskStatus.RUNNING in decide(running, entry).statuses


async def test_archive_without_a_document_has_unknown_features(
    installed: InstalledComponents, bin_dir: Path
) -> None:
    archive = BytesIO()
    zipfile.ZipFile(archive, "w").close()
    put(bin_dir / SHIM, b"#!/bin/sh\necho dstack-shim version 0.22.5; exit\n" + archive.getvalue())

    entry = json.loads(encode(await listed(installed, SHIM)))
    assert entry["features"] is None


async def test_file_that_does_not_tell_its_version_is_an_error(
    installed: InstalledComponents, bin_dir: Path
) -> None:
    put(bin_dir / RUNNER, b"<html>")

    assert await listed(installed) == Component(RUNNER, "", ComponentStatus.ERROR)


async def test_waiting_file_counts_as_installed_while_it_is_there(bin_dir: Path) -> None:
    target = Target(SHIM, bin_dir / SHIM, waiting=bin_dir / ".next")
    components = InstalledComponents([target], run, event_log())
    put(target.path, shim("1"))
    assert (await listed(components, SHIM)).version == "1"

    put(target.destination, shim("2"))
    assert (await listed(components, SHIM)).version == "2"

    target.destination.unlink()
    assert (await listed(components, SHIM)).version == "1"


# --- the runner's version, and the start


async def test_runner_version_is_that_of_the_file_now(
    installed: InstalledComponents, bin_dir: Path
) -> None:
    put(bin_dir / RUNNER, RUNNER_1)
    assert await installed.runner_version() == "1.0"
    put(bin_dir / "new", RUNNER_2).rename(bin_dir / RUNNER)
    assert await installed.runner_version() == "2.0"


@pytest.mark.parametrize(
    ("content", "why"), [(None, "not installed at"), (b"junk", "dstack-runner")]
)
async def test_missing_or_silent_runner_is_a_component_error(
    installed: InstalledComponents, bin_dir: Path, content: bytes | None, why: str
) -> None:
    if content is not None:
        put(bin_dir / RUNNER, content)

    with pytest.raises(ComponentError, match=why):
        await installed.runner_version()


async def test_start_is_refused_with_a_file_that_does_not_tell_its_version(
    installed: InstalledComponents, bin_dir: Path
) -> None:
    await installed.check_at_start()
    put(bin_dir / RUNNER, RUNNER_1)
    await installed.check_at_start()
    put(bin_dir / SHIM, b"#!/bin/sh\necho something else\n")

    with pytest.raises(StartupError, match=f"{bin_dir / SHIM} is not usable"):
        await installed.check_at_start()


async def test_start_removes_what_a_crash_left(
    installed: InstalledComponents, bin_dir: Path
) -> None:
    put(bin_dir / f".{RUNNER}.0123456789abcdef.new", b"half")
    put(bin_dir / ".dstack-runner.profile", b"somebody's")

    await installed.check_at_start()

    assert names(bin_dir) == [".dstack-runner.profile"]


async def test_start_removes_what_a_crash_left_of_a_file_that_was_to_wait(bin_dir: Path) -> None:
    target = Target(SHIM, bin_dir / SHIM, waiting=bin_dir / ".next")
    for place in (target.path, target.destination):
        put(place.with_name(f".{place.name}.0123456789abcdef.new"), b"half")

    await InstalledComponents([target], run, event_log()).check_at_start()

    assert names(bin_dir) == []


async def test_missing_runner_is_downloaded_at_start(
    installed: InstalledComponents, bin_dir: Path, files: FileServer
) -> None:
    files.replies["/r"] = Reply(RUNNER_1)

    await installed.fetch_if_missing(RUNNER, files.url("/r"))
    await installed.fetch_if_missing(RUNNER, files.url("/r"))

    assert await installed.runner_version() == "1.0"
    assert files.count("/r") == 1


async def test_failed_download_at_start_says_why(
    installed: InstalledComponents, bin_dir: Path, files: FileServer
) -> None:
    with pytest.raises(StartupError, match=r"dstack-runner could not be downloaded: .* 404"):
        await installed.fetch_if_missing(RUNNER, files.url("/none"))
    assert names(bin_dir) == []


# --- installing


async def test_installed_component_is_listed_and_executable_for_all(
    installed: InstalledComponents, bin_dir: Path, files: FileServer
) -> None:
    put(bin_dir / RUNNER, RUNNER_1)
    files.replies["/r"] = Reply(RUNNER_2)

    component = await install(installed, files.url("/r"))

    assert component == Component(RUNNER, "2.0", ComponentStatus.INSTALLED)
    assert stat.S_IMODE((bin_dir / RUNNER).stat().st_mode) == 0o755
    assert names(bin_dir) == [RUNNER]


async def test_new_shim_goes_beside_its_path_when_it_is_to_wait(
    bin_dir: Path, files: FileServer
) -> None:
    target = Target(SHIM, put(bin_dir / SHIM, shim("1")), waiting=bin_dir / ".next")
    components = InstalledComponents([target], run, event_log())
    files.replies["/s"] = Reply(shim("2"))

    component = await install(components, files.url("/s"), name=SHIM)

    assert component == Component(SHIM, "2", ComponentStatus.INSTALLED, ("persisted-state",))
    assert target.path.read_bytes() == shim("1")
    assert names(bin_dir) == [".next", SHIM]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"name": ""}, "name: expected one of dstack-runner, dstack-shim"),
        ({"name": "dstack-server"}, "name: expected"),
        ({"url": ""}, "url: expected"),
        ({"sha256": "abc"}, "sha256: expected 64"),
        ({"sha256": "g" * 64}, "sha256: expected 64"),
    ],
)
async def test_bad_request_is_refused_and_changes_nothing(
    installed: InstalledComponents, fields: dict[str, str], why: str
) -> None:
    request = ComponentInstallRequest(**{"name": RUNNER, "url": "http://x/y", **fields})

    with pytest.raises(InstallRefused, match=why):
        installed.install(request)

    assert (await listed(installed)).status is ComponentStatus.NOT_INSTALLED


async def test_one_install_of_a_component_at_once_but_of_both_together(
    installed: InstalledComponents, files: FileServer
) -> None:
    hold = threading.Event()
    files.replies["/r"] = Reply(RUNNER_1, hold=hold)
    files.replies["/s"] = Reply(shim("2"))
    request = ComponentInstallRequest(RUNNER, files.url("/r"))
    installed.install(request)
    await asyncio.to_thread(files.reached.wait, 20)

    with pytest.raises(InstallInProgress, match="dstack-runner is being installed"):
        installed.install(request)
    assert (await install(installed, files.url("/s"), name=SHIM)).version == "2"
    assert (await listed(installed)).status is ComponentStatus.INSTALLING

    hold.set()

    async def there() -> bool:
        return (await listed(installed)).version == "1.0"

    await eventually_async(there)
    installed.install(request)


BAD_FILES = {
    "a 403 page": Reply(b"<Error>AccessDenied</Error>", 403),
    "an error page with 200": Reply(b"<html>Please log in</html>"),
    "an empty file": Reply(b""),
    "a short body": Reply(RUNNER_2 + b"#" * 1000, cut=200),
    "no program": Reply(b"\x7fELF" + b"\0" * 60),
    "a script of another name": Reply(b"#!/bin/sh\necho dstack-shim version 2.0\n"),
    "a script that fails": Reply(RUNNER_2 + b"exit 1\n"),
    "a script that says nothing": Reply(b"#!/bin/sh\nexit 0\n"),
    "a script that hangs": Reply(b"#!/bin/sh\nexec sleep 600\n"),
}


@pytest.mark.parametrize("reply", BAD_FILES.values(), ids=BAD_FILES)
async def test_bad_file_never_takes_the_name(
    installed: InstalledComponents,
    bin_dir: Path,
    files: FileServer,
    reply: Reply,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(components_module, "PATIENT", 0.5)
    put(bin_dir / RUNNER, RUNNER_1)
    before = FileIdentity.of(bin_dir / RUNNER)
    files.replies["/r"] = reply

    component = await install(installed, files.url("/r"))

    assert component == Component(RUNNER, "1.0", ComponentStatus.INSTALLED)
    assert FileIdentity.of(bin_dir / RUNNER) == before
    assert names(bin_dir) == [RUNNER]
    assert "component.not_installed" in caplog.text


async def test_file_is_proved_before_it_takes_the_name(
    installed: InstalledComponents, bin_dir: Path, files: FileServer, tmp_path: Path
) -> None:
    """The new file itself looks at what has its name while it is asked for its version."""
    put(bin_dir / RUNNER, RUNNER_1)
    seen = tmp_path / "seen"
    look = f"[ -e {seen} ] || cat {bin_dir / RUNNER} > {seen}"
    script = f"#!/bin/sh\n{look}; echo dstack-runner version 3\n"
    files.replies["/r"] = Reply(script.encode())

    assert (await install(installed, files.url("/r"))).version == "3"

    assert seen.read_bytes() == RUNNER_1


async def test_digest_that_differs_is_refused_before_the_file_is_run(
    installed: InstalledComponents, bin_dir: Path, files: FileServer, tmp_path: Path
) -> None:
    trap = tmp_path / "ran"
    files.replies["/r"] = Reply(f"#!/bin/sh\ntouch {trap}\n".encode())

    component = await install(installed, files.url("/r"), sha256="0" * 64)

    assert component.status is ComponentStatus.NOT_INSTALLED
    assert not trap.exists()


async def test_digest_in_capitals_is_the_same(
    installed: InstalledComponents, files: FileServer
) -> None:
    files.replies["/r"] = Reply(RUNNER_1)
    digest = hashlib.sha256(RUNNER_1).hexdigest().upper()

    assert (await install(installed, files.url("/r"), sha256=digest)).version == "1.0"


async def test_unwritable_directory_is_a_readable_failure(
    installed: InstalledComponents,
    bin_dir: Path,
    files: FileServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bin_dir.rmdir()

    component = await install(installed, files.url("/r"))

    assert component.status is ComponentStatus.NOT_INSTALLED
    assert "cannot be written: No such file or directory" in caplog.text


async def test_full_disk_is_a_readable_failure(
    bin_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def no_space(url: str, path: Path, *, known: Fetched | None = None) -> Fetched | None:
        raise ComponentError(f"{url} could not be written down: No space left on device")

    put(bin_dir / RUNNER, RUNNER_1)
    target = Target(RUNNER, bin_dir / RUNNER)
    components = InstalledComponents([target], run, event_log(), fetch=no_space)

    assert (await install(components, "http://x/r")).version == "1.0"

    assert "No space left on device" in caplog.text
    assert names(bin_dir) == [RUNNER]


async def test_fault_of_ours_does_not_block_later_installs(
    bin_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(url: str, path: Path, *, known: Fetched | None = None) -> Fetched | None:
        raise ZeroDivisionError

    target = Target(RUNNER, bin_dir / RUNNER)
    components = InstalledComponents([target], run, event_log(), fetch=broken)

    for _ in range(2):
        assert (await install(components, "http://x")).status is ComponentStatus.NOT_INSTALLED
    assert "ZeroDivisionError" in caplog.text


async def test_secret_part_of_the_url_is_not_logged(
    installed: InstalledComponents, files: FileServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(0, logger="dstack_shim")  # urllib3's own debug lines go nowhere
    files.replies["/bad"] = Reply(b"", 500)
    files.replies["/r"] = Reply(RUNNER_1)

    for path in ("/none", "/bad", "/r", "/r"):
        await install(installed, files.url(f"{path}?X-Signature=s3cret"))

    assert caplog.records
    assert "s3cret" not in caplog.text


# --- shutdown


@pytest.mark.parametrize("moment", ["at once", "downloading", "proving"])
async def test_shutdown_cancels_an_install_and_leaves_nothing(
    installed: InstalledComponents,
    bin_dir: Path,
    files: FileServer,
    tmp_path: Path,
    moment: str,
) -> None:
    proving = tmp_path / "proving"
    slow = f"#!/bin/sh\ntouch {proving}; exec sleep 600\n".encode()
    hold = threading.Event() if moment == "downloading" else None
    files.replies["/r"] = Reply(slow, hold=hold)
    installed.install(ComponentInstallRequest(RUNNER, files.url("/r")))
    if moment == "downloading":
        await asyncio.to_thread(files.reached.wait, 20)
    elif moment == "proving":
        await eventually_async(proving.exists, within=20)

    await asyncio.wait_for(installed.close(), 5)

    assert names(bin_dir) == []
    with pytest.raises(ShuttingDown):
        installed.install(ComponentInstallRequest(RUNNER, files.url("/r")))


# --- what is there already


async def test_content_that_is_installed_is_not_fetched_when_its_digest_is_given(
    installed: InstalledComponents, bin_dir: Path, files: FileServer
) -> None:
    put(bin_dir / RUNNER, RUNNER_1)
    digest = hashlib.sha256(RUNNER_1).hexdigest()

    assert (await install(installed, files.url("/r"), sha256=digest)).version == "1.0"

    assert files.requests == []


@pytest.mark.parametrize("headers", [{"ETag": '"1"'}, {"Last-Modified": "then"}, {}])
async def test_content_of_a_url_is_not_fetched_twice(
    installed: InstalledComponents, bin_dir: Path, files: FileServer, headers: dict[str, str]
) -> None:
    """Servers up to 0.22.0 ask again at every check if the file is not what they expect."""
    content = RUNNER_2 + b"# padding\n" * 100_000
    files.replies["/r"] = Reply(content, headers=headers)
    await install(installed, files.url("/r"))
    before = FileIdentity.of(bin_dir / RUNNER)
    files.sent.clear()

    for _ in range(3):
        assert (await install(installed, files.url("/r"))).version == "2.0"

    assert FileIdentity.of(bin_dir / RUNNER) == before
    if headers:
        assert files.sent.get("/r", 0) == 0


async def test_content_equal_to_the_installed_file_is_not_placed_again(
    installed: InstalledComponents, bin_dir: Path, files: FileServer
) -> None:
    put(bin_dir / RUNNER, RUNNER_1)
    before = FileIdentity.of(bin_dir / RUNNER)
    files.replies["/r"] = Reply(RUNNER_1)

    assert (await install(installed, files.url("/r"))).version == "1.0"

    assert FileIdentity.of(bin_dir / RUNNER) == before


async def test_equal_content_that_cannot_be_executed_is_placed_again(
    installed: InstalledComponents, bin_dir: Path, files: FileServer
) -> None:
    put(bin_dir / RUNNER, RUNNER_1, mode=0o644)
    files.replies["/r"] = Reply(RUNNER_1)

    assert (await install(installed, files.url("/r"))).version == "1.0"


async def test_url_is_fetched_again_after_the_installed_file_was_changed_by_hand(
    installed: InstalledComponents, bin_dir: Path, files: FileServer
) -> None:
    files.replies["/r"] = Reply(RUNNER_2, headers={"ETag": '"1"'})
    await install(installed, files.url("/r"))
    put(bin_dir / RUNNER, RUNNER_1)

    assert (await install(installed, files.url("/r"))).version == "2.0"


async def test_new_content_at_the_same_url_is_installed(
    installed: InstalledComponents, files: FileServer
) -> None:
    files.replies["/r"] = Reply(RUNNER_1)
    await install(installed, files.url("/r"))
    files.replies["/r"] = Reply(RUNNER_2)

    assert (await install(installed, files.url("/r"))).version == "2.0"


# --- what was refused


@pytest.mark.parametrize("headers", [{"ETag": '"1"'}, {}])
async def test_refused_content_is_neither_fetched_nor_run_again_for_a_while(
    installed: InstalledComponents,
    files: FileServer,
    clock: Clock,
    tmp_path: Path,
    headers: dict[str, str],
) -> None:
    runs = tmp_path / "runs"
    script = f"#!/bin/sh\necho x >> {runs}\nexit 3\n" + "# padding\n" * 100_000
    files.replies["/r"] = Reply(script.encode(), headers=headers)
    for _ in range(3):
        await install(installed, files.url("/r"))
    assert runs.read_text() == "x\n"

    clock.now += components_module.REFUSED_FOR
    await install(installed, files.url("/r"))
    assert runs.read_text() == "x\nx\n"


async def test_refused_content_is_known_at_another_url_too(
    installed: InstalledComponents, files: FileServer, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    files.replies["/a"] = files.replies["/b"] = Reply(f"#!/bin/sh\necho x >> {runs}".encode())

    await install(installed, files.url("/a"))
    await install(installed, files.url("/b"))

    assert runs.read_text() == "x\n"


async def test_unfit_version_is_listed_as_error_until_another_is_installed(
    bin_dir: Path, files: FileServer
) -> None:
    target = Target(SHIM, put(bin_dir / SHIM, shim("1")), waiting=bin_dir / ".next")
    components = InstalledComponents([target], run, event_log())
    files.replies["/2"] = Reply(shim("2"))
    files.replies["/3"] = Reply(shim("3"))
    await install(components, files.url("/2"), name=SHIM)
    digest = hashlib.sha256(shim("2")).hexdigest()
    target.destination.unlink()

    components.refuse(SHIM, digest, "2", "never became ready")

    unfit = Component(SHIM, "2", ComponentStatus.ERROR)
    assert await listed(components, SHIM) == unfit
    assert await install(components, files.url("/2"), name=SHIM) == unfit
    assert await install(components, files.url("/2"), name=SHIM, sha256=digest) == unfit
    assert not target.destination.exists()
    assert (await install(components, files.url("/3"), name=SHIM)).version == "3"


async def test_report_of_an_unfit_version_ends_when_the_path_is_replaced_by_hand(
    bin_dir: Path,
) -> None:
    target = Target(SHIM, put(bin_dir / SHIM, shim("1")))
    components = InstalledComponents([target], run, event_log())
    components.refuse(SHIM, "0" * 64, "2", "died")
    assert (await listed(components, SHIM)).status is ComponentStatus.ERROR

    put(bin_dir / "new", shim("4")).rename(target.path)

    assert (await listed(components, SHIM)).version == "4"
