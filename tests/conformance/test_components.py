"""K: the two components, what they report, and how they are installed."""

from __future__ import annotations

import hashlib
import io
import json
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conformance.conftest import RUNNER_VERSION, MakeShim
from tests.conformance.containers import ContainerOf, mount_of
from tests.conformance.deadlines import Deadlines
from tests.conformance.images import Images
from tests.conformance.instance import Instance
from tests.conformance.rows import row
from tests.conformance.shim import Setting, Shim, free_port
from tests.conformance.web import Web, cut_short, held, with_status
from tests.eventually import eventually
from tests.lab.images import write_runner

RUNNER, SHIM = "dstack-runner", "dstack-shim"


class Place:
    """A shim whose components lie in a folder of their own."""

    def __init__(self, folder: Path, make: MakeShim, setting: Setting, web: Web) -> None:
        self.folder = folder
        self.runner = folder / "dstack-runner"
        self.file = folder / "dstack-shim"
        self._executable = setting.executable
        self._fails = web.serve("/fails", with_status(500))
        self.put_back()
        self.shim: Shim = make(
            f"--runner-binary-path={self.runner}",
            f"--shim-binary-path={self.file}",
            start=False,
        )

    def put_back(self) -> None:
        """Both files as they were at first, whatever else is there gone."""
        for extra in set(self.folder.iterdir()) - {self.runner, self.file}:
            extra.unlink()
        for file in (self.runner, self.file):
            file.unlink(missing_ok=True)
        write_runner(self.runner, "0.22.1")
        self.file.write_text(f'#!/bin/sh\nexec {self._executable} "$@"\n')
        self.file.chmod(0o755)

    def look_again(self, name: str) -> dict[str, Any]:
        """Make the shim look at a component's file: it does after a failed install too."""
        assert self.install(name, self._fails).status_code == 200
        return self.installed(name)

    def component(self, name: str) -> dict[str, Any]:
        listed = self.shim.get("/api/components").json()["components"]
        (found,) = [one for one in listed if one["name"] == name]
        return dict(found)

    def install(self, name: str, url: str, **more: Any) -> httpx.Response:
        return self.shim.post("/api/components/install", {"name": name, "url": url, **more})

    def installed(self, name: str) -> dict[str, Any]:
        """The component once no install is under way."""
        eventually(lambda: self.component(name)["status"] != "installing", within=15)
        return self.component(name)

    def names(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}


@pytest.fixture(scope="module")
def settled_place(module_shims: MakeShim, instance: Instance, setting: Setting, web: Web) -> Place:
    folder = instance.root / f"components-{free_port()}"
    folder.mkdir()
    return Place(folder, module_shims, setting, web)


@pytest.fixture
def stopped(settled_place: Place, clean: None) -> Place:
    """The place with its shim not running."""
    settled_place.shim.kill()
    settled_place.put_back()
    return settled_place


@pytest.fixture
def place(settled_place: Place, clean: None) -> Iterator[Place]:
    """The place with its shim running and both components as at first."""
    settled_place.put_back()
    if settled_place.shim.alive:
        for name in (RUNNER, SHIM):
            settled_place.look_again(name)
    else:
        settled_place.shim.start()
    yield settled_place
    for task in settled_place.shim.tasks:
        if settled_place.shim.alive:
            task.terminate()
            task.remove()
    settled_place.shim.tasks.clear()


@pytest.fixture
def runner_bytes(instance: Instance) -> Callable[[str], bytes]:
    """The stand-in runner of a version, as it would be downloaded."""
    file = instance.root / "download"
    return lambda version: write_runner(file, version).read_bytes()


def component_script(output: str, code: int = 0) -> bytes:
    return f"#!/bin/sh\necho '{output}'\nexit {code}\n".encode()


# -- what they report -------------------------------------------------------------------------


@row("K1", "K2", "K3")
def test_both_components_are_listed(place: Place) -> None:
    listed = place.shim.get("/api/components").json()["components"]
    assert sorted(one["name"] for one in listed) == [RUNNER, SHIM]
    assert all({"name", "version", "status"} <= set(one) for one in listed)
    runner, shim = place.component(RUNNER), place.component(SHIM)
    assert (runner["version"], runner["status"]) == ("0.22.1", "installed")
    own = place.shim.get("/api/healthcheck").json()["version"]
    assert (shim["version"], shim["status"]) == (own, "installed")


@row("K4", "L34")
def test_missing_runner_is_not_installed(stopped: Place) -> None:
    stopped.runner.unlink()
    stopped.shim.start()
    runner = stopped.component(RUNNER)
    assert (runner["version"], runner["status"]) == ("", "not-installed")


@row("K4", "K14")
@pytest.mark.parametrize("damage", ["garbage", "code", "words", "name", "not-executable"])
def test_file_that_is_no_component_is_an_error(damage: str, place: Place, web: Web) -> None:
    broken = {
        "garbage": b"<html>sign in first</html>",
        "code": component_script("dstack-runner version 1.0", code=3),
        "words": component_script("dstack-runner 1.0"),
        "name": component_script("dstack-shim version 1.0"),
        "not-executable": place.runner.read_bytes(),
    }[damage]
    place.runner.write_bytes(broken)
    if damage == "not-executable":
        place.runner.chmod(0o644)
    runner = place.look_again(RUNNER)
    assert (runner["version"], runner["status"]) == ("", "error")


@row("K5")
def test_version_that_never_comes_does_not_hang_the_shim(place: Place, web: Web) -> None:
    place.runner.write_text("#!/bin/sh\nexec sleep 1000\n")
    assert place.install(RUNNER, web.serve("/fails", with_status(500))).status_code == 200
    assert place.shim.get("/api/components", timeout=5).status_code == 200
    assert place.shim.get("/api/healthcheck", timeout=5).status_code == 200


# -- install ----------------------------------------------------------------------------------


@row("K6", "K7", "K10", "K11", "A3")
def test_runner_is_installed_in_the_background(
    place: Place, web: Web, runner_bytes: Callable[[str], bytes]
) -> None:
    go_on = threading.Event()
    url = web.serve("/runner", held(runner_bytes("0.22.2"), go_on))
    answer = place.install(RUNNER, url)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.text.strip() == ""
    during = eventually(
        lambda: (one := place.component(RUNNER))["status"] == "installing" and one, within=3
    )
    assert isinstance(during, dict)
    assert during["version"] == ""
    assert b"0.22.1" in place.runner.read_bytes()
    go_on.set()
    runner = place.installed(RUNNER)
    assert (runner["version"], runner["status"]) == ("0.22.2", "installed")
    assert place.runner.stat().st_mode & 0o777 == 0o755


@row("K8")
def test_second_install_meanwhile_is_409(
    place: Place, web: Web, runner_bytes: Callable[[str], bytes]
) -> None:
    go_on = threading.Event()
    url = web.serve("/runner", held(runner_bytes("0.22.2"), go_on))
    assert place.install(RUNNER, url).status_code == 200
    eventually(lambda: place.component(RUNNER)["status"] == "installing", within=3)
    assert place.install(RUNNER, url).status_code == 409
    go_on.set()
    place.installed(RUNNER)
    assert place.install(RUNNER, url).status_code == 200
    place.installed(RUNNER)


@row("K9")
@pytest.mark.parametrize(
    ("name", "url"),
    [("", "http://x"), ("dstack-other", "http://x"), (RUNNER, ""), (None, None), (SHIM, None)],
)
def test_install_needs_a_known_name_and_a_url(
    name: str | None, url: str | None, place: Place
) -> None:
    body = {"name": name, "url": url}
    assert place.shim.post("/api/components/install", body).status_code == 400
    assert place.component(RUNNER)["status"] == "installed"


@row("K11")
def test_name_never_holds_a_partial_file(
    place: Place, web: Web, runner_bytes: Callable[[str], bytes]
) -> None:
    old, new = place.runner.read_bytes(), runner_bytes("0.22.2") + b"# padding\n" * 50_000
    before = place.runner.stat().st_ino
    go_on = threading.Event()
    place.install(RUNNER, web.serve("/runner", held(new, go_on)))
    temporary = eventually(lambda: place.names() - {RUNNER, SHIM}, within=5)
    assert place.runner.read_bytes() == old
    assert temporary  # in the same folder, so that a rename can do it
    go_on.set()
    seen = set()
    while place.component(RUNNER)["status"] == "installing":
        seen.add(len(place.runner.read_bytes()))
    seen.add(len(place.runner.read_bytes()))
    assert seen <= {len(old), len(new)}
    assert place.runner.read_bytes() == new
    assert place.runner.stat().st_ino != before
    assert place.names() == {RUNNER, SHIM}


@row("K12")
@pytest.mark.parametrize("status", [301, 302, 307])
def test_redirects_are_followed(
    status: int, place: Place, web: Web, runner_bytes: Callable[[str], bytes]
) -> None:
    target = web.serve("/moved-runner", runner_bytes("0.22.3"))
    place.install(RUNNER, web.serve("/old-place", with_status(status, target)))
    assert place.installed(RUNNER)["version"] == "0.22.3"


@row("K12", "K13", "K14")
@pytest.mark.parametrize("how", ["403", "404", "500", "204", "short", "refused", "nonsense"])
def test_failed_download_leaves_everything_as_it_was(
    how: str, place: Place, web: Web, runner_bytes: Callable[[str], bytes]
) -> None:
    body = runner_bytes("0.22.2")
    if how == "short":
        url = web.serve("/runner", cut_short(body[: len(body) // 2], len(body)))
    elif how == "refused":
        url = "http://127.0.0.1:1/runner"
    elif how == "nonsense":
        url = "no url at all"
    else:
        url = web.serve("/runner", with_status(int(how)))
    before = place.runner.read_bytes()
    assert place.install(RUNNER, url).status_code == 200
    runner = place.installed(RUNNER)
    assert (runner["version"], runner["status"]) == ("0.22.1", "installed")
    assert place.runner.read_bytes() == before
    assert place.names() == {RUNNER, SHIM}


@row("K15", "K14")
@pytest.mark.full
@pytest.mark.last(3)
@pytest.mark.timeout(700)
def test_install_ends_after_ten_minutes(deadlines: Deadlines) -> None:
    seconds = deadlines.install.wait(within=630)
    assert 590 <= seconds <= 630

    def runner() -> Any:
        listed = deadlines.shim.get("/api/components").json()["components"]
        (found,) = [one for one in listed if one["name"] == RUNNER]
        return found["version"], found["status"]

    eventually(lambda: runner() == (RUNNER_VERSION, "installed"), within=10)


@row("K16", "A25")
@pytest.mark.parametrize("force", [False, True])
def test_shutdown_cancels_an_install(
    force: bool, place: Place, web: Web, runner_bytes: Callable[[str], bytes]
) -> None:
    go_on = threading.Event()
    place.install(RUNNER, web.serve("/runner", held(runner_bytes("0.22.2"), go_on)))
    eventually(lambda: place.component(RUNNER)["status"] == "installing", within=3)
    assert place.shim.post("/api/shutdown", {"force": force}).status_code == 200
    eventually(lambda: not place.shim.alive, within=8, saying="the process has ended")
    go_on.set()
    assert b"0.22.1" in place.runner.read_bytes()
    place.shim.start()
    assert place.component(RUNNER)["version"] == "0.22.1"


@row("K17", "C14")
def test_running_task_keeps_its_runner(
    place: Place,
    web: Web,
    runner_bytes: Callable[[str], bytes],
    images: Images,
    container_of: ContainerOf,
) -> None:
    task = place.shim.run(images.idle)
    place.install(RUNNER, web.serve("/runner", runner_bytes("0.22.2")))
    assert place.installed(RUNNER)["version"] == "0.22.2"
    container = container_of(task)
    path = mount_of(container, "/usr/local/bin/dstack-runner")["Destination"]
    assert b"0.22.1" in container.exec_run([path, "--version"]).output
    other = container_of(place.shim.run(images.idle, name="other"))
    assert b"0.22.2" in other.exec_run([path, "--version"]).output


@row("K18", "K10", "A22")
def test_running_shim_keeps_its_own_version(place: Place, web: Web) -> None:
    own = place.shim.get("/api/healthcheck").json()["version"]
    place.install(SHIM, web.serve("/shim", component_script("dstack-shim version 9.9.9")))
    shim = place.installed(SHIM)
    assert (shim["version"], shim["status"]) == ("9.9.9", "installed")
    assert place.shim.get("/api/healthcheck").json()["version"] == own


@row("K19")
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>an error page that came with 200</html>",
        component_script("dstack-shim version 0.22.2"),
        component_script("dstack-runner version"),
        component_script("dstack-runner version 0.22.2", code=1),
    ],
    ids=["empty", "page", "other-name", "two-words", "code"],
)
def test_download_that_is_no_component_does_not_take_the_name(
    body: bytes, place: Place, web: Web
) -> None:
    before = place.runner.read_bytes()
    assert place.install(RUNNER, web.serve("/runner", body)).status_code == 200
    place.installed(RUNNER)
    assert place.runner.read_bytes() == before
    assert place.names() == {RUNNER, SHIM}
    assert place.component(RUNNER)["version"] == "0.22.1"


@row("K20")
@pytest.mark.parametrize("letters", ["lower", "upper", "wrong", "empty"])
def test_sha256_decides(
    letters: str, place: Place, web: Web, runner_bytes: Callable[[str], bytes]
) -> None:
    body = runner_bytes("0.22.2")
    right = hashlib.sha256(body).hexdigest()
    given = {"lower": right, "upper": right.upper(), "wrong": "0" * 64, "empty": ""}[letters]
    assert place.install(RUNNER, web.serve("/runner", body), sha256=given).status_code == 200
    expected = "0.22.1" if letters == "wrong" else "0.22.2"
    assert place.installed(RUNNER)["version"] == expected
    assert place.names() == {RUNNER, SHIM}


@row("K21")
def test_content_that_is_there_is_not_fetched(place: Place, web: Web) -> None:
    digest = hashlib.sha256(place.runner.read_bytes()).hexdigest()
    url = web.serve("/same", place.runner.read_bytes())
    web.asked.clear()
    assert place.install(RUNNER, url, sha256=digest).status_code == 200
    runner = place.installed(RUNNER)
    assert (runner["version"], runner["status"]) == ("0.22.1", "installed")
    assert web.asked == []


@row("K22")
def test_features_are_those_of_the_installed_file(stopped: Place, instance: Instance) -> None:
    ran = instance.root / f"ran-{free_port()}"
    archive = io.BytesIO()
    document = {
        "name": SHIM,
        "version": "9.9.9",
        "features": ["persisted-state", "of-tomorrow"],
        "implementation": {"name": "test", "version": "1"},
    }
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("dstack-shim.json", json.dumps(document))
    # Anything but the question for its version leaves a trace.
    script = (
        f'#!/bin/sh\n[ "$*" = --version ] || touch {ran}\n'
        "echo 'dstack-shim version 9.9.9'\nexit 0\n"
    )
    stopped.file.write_bytes(script.encode() + archive.getvalue())
    stopped.shim.start()
    shim = stopped.component(SHIM)
    assert shim["features"] == ["persisted-state", "of-tomorrow"]
    assert not ran.exists()


@row("K22")
@pytest.mark.parametrize("kind", ["empty-zip", "odd-document"])
def test_features_are_null_where_unknown(kind: str, stopped: Place) -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        name = "dstack-shim.json" if kind == "odd-document" else "other"
        file.writestr(name, '{"features": "all"}')
    stopped.file.write_bytes(component_script("dstack-shim version 0.21.2") + archive.getvalue())
    stopped.shim.start()
    shim = stopped.component(SHIM)
    assert shim["version"] == "0.21.2"
    assert shim["features"] is None


@row("K22")
def test_a_file_that_lists_no_features_has_no_such_key(stopped: Place) -> None:
    stopped.file.write_bytes(component_script("dstack-shim version 0.21.2"))
    stopped.shim.start()
    shim = stopped.component(SHIM)
    assert shim["version"] == "0.21.2"
    assert "features" not in shim


@row("K1", "K22")
def test_runner_has_no_features(place: Place) -> None:
    assert not place.component(RUNNER).get("features")


@row("K14", "K12")
def test_unwritable_folder_is_a_failed_install(place: Place, web: Web) -> None:
    missing = place.folder / "gone"
    away = place.folder.rename(f"{place.folder}.away")
    try:
        assert place.install(RUNNER, web.serve("/runner", b"x")).status_code == 200
        runner = place.installed(RUNNER)
        assert (runner["version"], runner["status"]) == ("", "not-installed")
    finally:
        away.rename(place.folder)
    assert not missing.exists()
