"""L: flags, variables, what stops a start, and how a shim ends."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from typing import Any

import httpx
import pytest

from tests.conformance.conftest import MakeShim
from tests.conformance.containers import ContainerOf, runner_arguments
from tests.conformance.engine import Request, Wire
from tests.conformance.images import Images
from tests.conformance.instance import Instance
from tests.conformance.rows import row
from tests.conformance.shim import Setting, Shim, free_port, run_to_end
from tests.conformance.web import Web
from tests.eventually import eventually
from tests.lab.images import write_runner

Run = Callable[..., CompletedProcess[str]]


@pytest.fixture
def home(instance: Instance) -> Path:
    made = instance.root / f"cli-{free_port()}" / ".dstack"
    made.mkdir(parents=True)
    return made


@pytest.fixture
def refused(setting: Setting, home: Path) -> Run:
    """Start it with these arguments: it must exit 1 with a message on standard error."""

    def start(*arguments: str, within: float = 20, **variables: str) -> CompletedProcess[str]:
        given = [f"--shim-home={home}", f"--shim-http-port={free_port()}", *arguments]
        done = run_to_end(setting, home, given, variables, within)
        assert done.returncode == 1, done.stderr
        assert done.stderr.strip()
        return done

    return start


# -- version ----------------------------------------------------------------------------------


@row("L18")
@pytest.mark.parametrize("flag", ["--version", "-v", "-version"])
def test_version_is_three_words(flag: str, setting: Setting, home: Path) -> None:
    done = run_to_end(setting, home, [flag])
    assert done.returncode == 0
    name, word, version = done.stdout.split(" ")
    assert (name, word) == ("dstack-shim", "version")
    assert version.endswith("\n")
    assert version.strip()
    assert "\n" not in version.strip()


@row("L19")
@pytest.mark.parametrize(
    "variables",
    [
        {"DSTACK_SHIM_HTTP_PORT": "many"},
        {"DSTACK_DOCKER_PRIVILEGED": "perhaps"},
        {"DSTACK_SHIM_LOG_LEVEL": "loud", "DOCKER_HOST": "nonsense://"},
        {"DSTACK_SHIM_HOME": "/nowhere", "PATH": "/usr/bin:/bin", "HOME": ""},
    ],
)
def test_version_needs_no_sane_environment(
    variables: dict[str, str], setting: Setting, home: Path
) -> None:
    done = run_to_end(setting, home, ["--version"], variables)
    assert done.returncode == 0
    assert done.stdout.startswith("dstack-shim version ")


@row("L40", "L18")
def test_it_runs_as_one_file_that_only_root_may_read(
    setting: Setting, instance: Instance, home: Path
) -> None:
    folder = instance.root / f"alone-{free_port()}"
    folder.mkdir()
    file = folder / "dstack-shim"
    file.write_bytes(setting.executable.read_bytes())
    file.chmod(0o711)
    alone = Setting(file, setting.path, setting.engine, setting.runner)
    assert run_to_end(alone, home, ["--version"]).returncode == 0
    shim = Shim(alone, home)
    try:
        shim.start()
        # What it keeps there for itself has a dot name, as a component on its way has.
        names = [place.name for place in folder.iterdir() if not place.name.startswith(".")]
        assert names == ["dstack-shim"]
    finally:
        shim.close()


# -- how flags are written --------------------------------------------------------------------


@row("L20", "L3", "L1")
@pytest.mark.parametrize("dashes", ["-", "--"])
@pytest.mark.parametrize("joint", ["=", " "])
def test_flags_take_one_dash_or_two_and_space_or_equals(
    dashes: str, joint: str, new_shim: MakeShim
) -> None:
    shim = new_shim(start=False)
    words = [f"{dashes}shim-home{joint}{shim.home}", f"{dashes}shim-http-port{joint}{shim.port}"]
    shim.without_argument("--shim-home")
    shim.without_argument("--shim-http-port")
    shim.arguments = [piece for word in words for piece in word.split(" ")]
    shim.start()
    assert (shim.home / "shim.log").exists()


@row("L21", "L17", "H19")
@pytest.mark.parametrize(
    ("words", "on"),
    [
        (["--service"], True),
        (["--service=true"], True),
        (["--service=false"], False),
        (["--service", "--privileged"], True),
    ],
)
def test_boolean_flag_stands_alone(words: list[str], on: bool, new_shim: MakeShim) -> None:
    shim = new_shim(*words)
    assert (shim.home / "host_info.json").exists() is on


@row("L22", "L29")
@pytest.mark.parametrize(
    "words",
    [
        ["--shim-hom=/x"],
        ["--runner-binary=/x"],
        ["--priv"],
        ["--no-such-flag"],
        ["--shim-http-port=many"],
        ["--shim-http-port", "1.5"],
        ["--runner-ssh-port"],
        ["--service=perhaps"],
        ["--dcgm-exporter-interval="],
    ],
    ids=" ".join,
)
def test_usage_error_exits_1(words: list[str], refused: Run) -> None:
    refused(*words)


@row("L23")
def test_command_line_beats_the_environment(
    new_shim: MakeShim, images: Images, container_of: ContainerOf
) -> None:
    variables = {
        "DSTACK_SHIM_HTTP_PORT": str(free_port()),
        "DSTACK_SHIM_HOME": "/nowhere",
        "DSTACK_DOCKER_PRIVILEGED": "true",
        "DSTACK_RUNNER_HTTP_PORT": "1",
    }
    shim = new_shim("--privileged=false", variables=variables)
    task = shim.run(images.idle)
    assert container_of(task).attrs["HostConfig"]["Privileged"] is False
    assert str(shim.runner_ports[0]) in runner_arguments(container_of(task))


@row("L1", "L3", "L6", "L7", "L8", "L9", "L10")
def test_variables_set_what_flags_set(
    new_shim: MakeShim, images: Images, container_of: ContainerOf
) -> None:
    shim = new_shim(start=False)
    for flag in ("--shim", "--runner"):
        shim.without_argument(flag)
    http, ssh = shim.runner_ports
    shim.variables |= {
        "DSTACK_SHIM_HOME": str(shim.home),
        "DSTACK_SHIM_HTTP_PORT": str(shim.port),
        "DSTACK_RUNNER_BINARY_PATH": str(shim.setting.runner),
        "DSTACK_RUNNER_HTTP_PORT": str(http),
        "DSTACK_RUNNER_SSH_PORT": str(ssh),
        "DSTACK_RUNNER_LOG_LEVEL": "4",
        "DSTACK_RUNNER_SSH_LOG_LEVEL": "verbose",
    }
    task = shim.start().run(images.idle)
    arguments = runner_arguments(container_of(task))
    assert arguments[:2] == ["--log-level", "4"]
    assert arguments[5:9] == ["--http-port", str(http), "--ssh-port", str(ssh)]
    assert arguments[-2:] == ["--ssh-log-level", "verbose"]
    assert task.dir.is_dir()


@row("L3", "L6", "L7", "L8", "L9")
def test_defaults(new_shim: MakeShim, images: Images, container_of: ContainerOf) -> None:
    write_runner(Path("/usr/local/bin/dstack-runner"), "0.22.5")  # the sandbox's own
    shim = new_shim(start=False, port=10998)
    for flag in ("--shim-http", "--runner"):
        shim.without_argument(flag)
    arguments = runner_arguments(container_of(shim.start().run(images.idle)))
    assert arguments[:2] == ["--log-level", "info"]
    assert arguments[5:9] == ["--http-port", "10999", "--ssh-port", "10022"]
    assert "--ssh-log-level" not in arguments


@row("L24")
def test_unknown_variables_are_ignored(new_shim: MakeShim) -> None:
    odd = {"DSTACK_SHIM_TOMORROW": "1", "DSTACK_RUNNER_VERSION": "x", "MY_FLEET_ENV": "a b"}
    assert new_shim(variables=odd).alive


@row("L25", "L17")
@pytest.mark.parametrize(
    ("value", "on"),
    [
        *((value, True) for value in ("1", "T", "TRUE", "True")),
        *((value, False) for value in ("0", "f", "false", "")),
    ],
)
def test_boolean_variable(value: str, on: bool, new_shim: MakeShim) -> None:
    shim = new_shim(variables={"DSTACK_SERVICE_MODE": value})
    assert (shim.home / "host_info.json").exists() is on


@row("L25", "L29")
@pytest.mark.parametrize("value", ["yes", "on", "2", "tRUE"])
def test_other_boolean_values_are_usage_errors(value: str, refused: Run) -> None:
    refused(DSTACK_DOCKER_PRIVILEGED=value)


@row("L26")
def test_empty_variables(new_shim: MakeShim, images: Images, container_of: ContainerOf) -> None:
    empty = {
        "DSTACK_DCGM_EXPORTER_INTERVAL": "",
        "DSTACK_RUNNER_DOWNLOAD_URL": "",
        "DSTACK_DOCKER_PASS_ENV": "",
        "http_proxy": "http://proxy",
    }
    container = container_of(new_shim(variables=empty).run(images.idle))
    assert not [word for word in container.attrs["Config"]["Env"] if "http_proxy" in word]


@row("L26", "L29")
def test_number_that_is_none_is_a_usage_error(refused: Run) -> None:
    refused(DSTACK_RUNNER_SSH_PORT="ssh")


# -- log levels -------------------------------------------------------------------------------


@row("L27", "L4")
@pytest.mark.parametrize("level", ["FATAL", "warning", "Debug", "1", "6"])
def test_log_level_by_name_or_digit(level: str, new_shim: MakeShim) -> None:
    shim = new_shim(f"--shim-log-level={level}", variables={"DSTACK_RUNNER_LOG_LEVEL": level})
    lines = len((shim.home / "shim.log").read_text().splitlines())
    if level in {"FATAL", "1"}:
        assert lines == 0
    if level in {"Debug", "6"}:
        assert lines > 0


@row("L28", "L4", "L9")
@pytest.mark.parametrize("level", ["loud", "0", "7", ""])
@pytest.mark.parametrize("whose", ["shim", "runner"])
def test_other_levels_stop_the_start(level: str, whose: str, refused: Run) -> None:
    refused(f"--{whose}-log-level={level}")


# -- what stops a start -----------------------------------------------------------------------


@row("L30", "L39")
@pytest.mark.parametrize("address", ["unix:///nowhere.sock", "tcp://127.0.0.1:1"])
def test_start_without_docker_is_given_up_soon(address: str, refused: Run) -> None:
    before = time.monotonic()
    done = refused(DOCKER_HOST=address)
    assert time.monotonic() - before < 5
    assert "docker" in done.stderr.lower()


@row("L39")
def test_engine_that_never_answers_is_given_up_soon(refused: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        try:
            refused(DOCKER_HOST=address, within=7)
        except TimeoutExpired:
            pytest.fail("it waits for ever")


@row("L31")
def test_start_without_home_is_refused(setting: Setting, home: Path) -> None:
    home.rmdir()
    arguments = [f"--shim-home={home}", f"--shim-http-port={free_port()}"]
    done = run_to_end(setting, home, arguments)
    assert done.returncode == 1
    assert str(home) in done.stderr
    assert not home.exists()


@row("L33", "K3")
@pytest.mark.parametrize(
    "output",
    ["dstack-runner", "dstack-runner version 0.1 more", "other-tool version 0.1", ""],
)
def test_runner_with_a_malformed_version_stops_the_start(
    output: str, refused: Run, instance: Instance
) -> None:
    runner = instance.root / "odd-runner"
    runner.write_text(f"#!/bin/sh\necho '{output}'\n")
    runner.chmod(0o755)
    refused(f"--runner-binary-path={runner}")


@row("L33", "L2")
def test_shim_file_with_a_malformed_version_stops_the_start(
    refused: Run, instance: Instance, setting: Setting
) -> None:
    file = instance.root / "odd-shim"
    file.write_text("#!/bin/sh\necho 'nothing of the kind'\n")
    file.chmod(0o755)
    refused(f"--shim-binary-path={file}", f"--runner-binary-path={setting.runner}")


@row("L34", "K4")
def test_missing_runner_is_not_fatal(new_shim: MakeShim) -> None:
    shim = new_shim("--runner-binary-path=/nowhere/dstack-runner")
    assert shim.alive


@row("L5")
@pytest.mark.parametrize("there", [False, True])
def test_runner_is_downloaded_at_start_if_missing(
    there: bool, new_shim: MakeShim, instance: Instance, web: Web
) -> None:
    source = write_runner(instance.root / "served-runner", "0.22.9")
    url = web.serve("/runner-at-start", source.read_bytes())
    target = instance.root / f"runner-{free_port()}"
    if there:
        write_runner(target, "0.22.1")
    web.asked.clear()
    shim = new_shim(f"--runner-binary-path={target}", f"--runner-download-url={url}")
    (runner,) = [
        one for one in shim.get("/api/components").json()["components"]
        if one["name"] == "dstack-runner"
    ]  # fmt: skip
    assert runner["version"] == ("0.22.1" if there else "0.22.9")
    assert web.asked == ([] if there else ["/runner-at-start"])
    assert target.stat().st_mode & 0o777 == 0o755


@row("L32", "L5")
@pytest.mark.parametrize("url", ["http://127.0.0.1:1/runner", "not-a-url", "{web}/no-such-file"])
def test_failed_download_stops_the_start(url: str, refused: Run, web: Web) -> None:
    base = web.serve("/", b"").rstrip("/")
    refused(
        "--runner-binary-path=/usr/local/bin/never-there",
        f"--runner-download-url={url.format(web=base)}",
    )
    assert not Path("/usr/local/bin/never-there").exists()


@row("L35", "R31")
def test_taken_port_stops_the_start(refused: Run, home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused(f"--shim-http-port={taken.getsockname()[1]}")
    assert not (home / "runners").exists() or not list((home / "runners").iterdir())


# -- how it ends ------------------------------------------------------------------------------


@row("L37", "R1")
@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_shim_and_no_container(
    sign: signal.Signals, new_shim: MakeShim, images: Images, container_of: ContainerOf
) -> None:
    shim = new_shim()
    task = shim.run(images.idle)
    before = container_of(task).attrs["State"]
    shim.stop(sign)
    after = container_of(task).attrs["State"]
    assert (after["Status"], after["Pid"]) == ("running", before["Pid"])
    shim.start()
    assert task.status == "running"


@row("L38")
@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "shutdown"])
def test_request_under_way_is_answered(
    how: str, new_shim: MakeShim, images: Images, wire: Wire
) -> None:
    shim = new_shim()
    task = shim.run(images.idle)
    asked, go_on = threading.Event(), threading.Event()

    def hold(request: Request) -> None:
        asked.set()
        go_on.wait(20)

    with (
        wire.rule("POST", r"^/containers/[^/]+/(stop|kill)", hold),
        ThreadPoolExecutor(1) as pool,
    ):
        ending = pool.submit(task.terminate)
        assert asked.wait(5)
        _ask_to_end(shim, how)
        eventually(lambda: _refuses(shim), within=3, saying="it listens no more")
        go_on.set()
        assert ending.result().status_code == 200
    eventually(lambda: not shim.alive, within=6, saying="the process has ended")


def _ask_to_end(shim: Shim, how: str) -> None:
    if how == "shutdown":
        assert shim.post("/api/shutdown", {"force": False}).status_code == 200
    else:
        assert shim.process is not None
        shim.process.send_signal(getattr(signal, how))


def _refuses(shim: Shim) -> bool:
    try:
        httpx.get(f"http://localhost:{shim.port}/api/healthcheck", trust_env=False, timeout=1)
    except httpx.TransportError:
        return True
    return False


@row("L38")
def test_draining_ends_after_5_seconds(new_shim: MakeShim, images: Images, wire: Wire) -> None:
    shim = new_shim()
    task = shim.run(images.idle)
    asked, go_on = threading.Event(), threading.Event()

    def hold(request: Request) -> Any:
        asked.set()
        go_on.wait(20)

    def terminate() -> None:
        try:
            task.terminate()
        except httpx.TransportError:
            return

    with wire.rule("POST", r"^/containers/[^/]+/(stop|kill)", hold):
        waiting = threading.Thread(target=terminate)
        waiting.start()
        assert asked.wait(5)
        _ask_to_end(shim, "SIGTERM")
        eventually(lambda: not shim.alive, within=8, saying="the process has ended")
        go_on.set()
        waiting.join(10)
