"""GPU health through libdcgm: a stand-in library, compiled here, in a real process."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from dstack_shim_contracts.api import Dcgm, Incident

from dstack_shim.host import dcgm_health
from dstack_shim.host.dcgm_health import DcgmHealth
from dstack_shim.log import event_log
from tests.eventually import eventually_async

SOURCE = Path(__file__).parents[2] / "lab" / "stand_in_dcgm.c"
HEALTHY = Dcgm(0, ())


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Compile the stand-in as DCGM 4 and as DCGM 3, and a library without any function."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc here to compile the stand-in for libdcgm")
    directory = tmp_path_factory.mktemp("libdcgm")
    built = {}
    for version, incidents in (("4", 1024), ("3", 64)):
        target = directory / f"libdcgm.so.{version}"
        options = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-DINCIDENTS={incidents}"]
        subprocess.run(["gcc", *options, "-o", target, SOURCE], check=True, timeout=60)
        built[version] = str(target)
    built["empty"] = str(directory / "libempty.so")
    empty = ["gcc", "-shared", "-x", "c", "/dev/null", "-o", built["empty"]]
    subprocess.run(empty, check=True, timeout=60)
    return built


@pytest.fixture
def mood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file whose words tell the stand-in how to behave."""
    mood = tmp_path / "mood"
    mood.touch()
    monkeypatch.setenv("STAND_IN_DCGM", str(mood))
    return mood


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


Make = Callable[..., DcgmHealth]


@pytest.fixture
async def make(
    libraries: dict[str, str], mood: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Make]:
    monkeypatch.setattr(dcgm_health, "PATIENCE", 30.0)  # a loaded machine starts a Python slowly
    made: list[DcgmHealth] = []

    def make_one(*, version: str = "4", address: str = "") -> DcgmHealth:
        names = ("libdcgm.so.not-there", libraries[version])
        made.append(DcgmHealth(event_log(), address=address, libraries=names, monotonic=clock))
        return made[-1]

    yield make_one
    for one in made:
        await one.stop()


def process_of(health: DcgmHealth) -> int:
    assert health._process is not None
    return health._process.pid


@pytest.mark.parametrize("version", ["4", "3"])
async def test_healthy_gpus_are_0_without_incidents(make: Make, version: str) -> None:
    assert await make(version=version).check() == HEALTHY


@pytest.mark.parametrize("version", ["4", "3"])
async def test_incidents_have_all_their_fields(make: Make, mood: Path, version: str) -> None:
    mood.write_text("fail")

    health = await make(version=version).check()

    message = 'check 1 of embedded �"{}'
    assert health == Dcgm(
        20,
        (
            Incident(16, 20, message.format(0), 4294967295, 1, 0),
            Incident(16, 10, message.format(1), 4294967295, 1, 1),
        ),
    )


@pytest.mark.parametrize(("version", "count"), [("4", 1024), ("3", 64)])
async def test_full_response_is_read_to_its_end(
    make: Make, mood: Path, version: str, count: int
) -> None:
    mood.write_text("full")

    health = await make(version=version).check()

    assert health is not None
    assert [incident.entity_id for incident in health.incidents] == list(range(count))


async def test_one_process_lives_on_from_question_to_question(make: Make, mood: Path) -> None:
    mood.write_text("fail")
    health = make()
    await health.check()
    first = process_of(health)

    again = await health.check()

    assert process_of(health) == first
    assert again is not None
    assert again.incidents[0].error_message.startswith("check 2 ")


async def test_running_host_engine_is_connected_to_by_its_address(make: Make, mood: Path) -> None:
    mood.write_text("fail")

    health = await make(address="10.0.0.1:5555").check()

    assert health is not None
    assert health.incidents[0].error_message.startswith("check 1 of 10.0.0.1:5555 ")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("odd-overall", "overall_health: expected one of 0, 10, 20"),
        ("fail odd-incident", "incidents[0].health: expected one of 0, 10, 20"),
        ("too-many", "more incidents than the response has room for"),
        ("lost", "dcgmHealthCheck: Host engine connection invalid (-21)"),
        ("init-fails", "dcgmInit: code (-3)"),
        ("crash", "the process ended (code -11)"),
    ],
)
async def test_whatever_goes_wrong_is_no_health_a_reason_in_the_log_and_a_new_start_later(
    make: Make,
    mood: Path,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    words: str,
    reason: str,
) -> None:
    mood.write_text(words)
    health = make()

    assert await health.check() is None
    assert reason in caplog.text
    mood.write_text("")
    assert await health.check() is None, "not tried again at once"
    clock.now += dcgm_health.FIRST_PAUSE
    assert await health.check() == HEALTHY


async def test_unreachable_host_engine_is_no_health(
    make: Make, mood: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mood.write_text("refuse")

    assert await make(address="127.0.0.1:1").check() is None
    assert "dcgmConnect: Host engine connection invalid (-21)" in caplog.text


async def test_host_without_the_library_has_no_health_and_is_told_once(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    health = DcgmHealth(event_log(), libraries=("libdcgm.so.none",), monotonic=clock)

    for _ in range(3):
        assert await health.check() is None
        clock.now += dcgm_health.LONGEST_PAUSE
    await health.stop()

    assert caplog.text.count("dcgm.no_health") == 1
    assert "libdcgm.so.none: cannot open shared object file" in caplog.text


async def test_library_without_the_functions_is_no_health(
    libraries: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    health = DcgmHealth(event_log(), libraries=(libraries["empty"],))

    assert await health.check() is None
    await health.stop()

    assert "undefined symbol: dcgmInit" in caplog.text


async def test_slow_start_does_not_hold_a_request_and_its_answer_is_for_a_later_one(
    make: Make, mood: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcgm_health, "PATIENCE", 0.05)
    mood.write_text("slow-start")
    health = make()
    health.start()

    assert await health.check() is None
    await eventually_async(lambda: health._question is not None and health._question.done())
    assert await health.check() == HEALTHY


async def test_process_that_hangs_is_killed_and_a_new_one_started(
    make: Make, mood: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    health = make()
    assert await health.check() == HEALTHY
    stuck = process_of(health)
    mood.write_text("hang")
    monkeypatch.setattr(dcgm_health, "PATIENCE", 0.05)
    assert await health.check() is None
    assert process_of(health) == stuck, "it may only be slow"

    clock.now += dcgm_health.STUCK
    assert await health.check() is None
    await eventually_async(lambda: not Path(f"/proc/{stuck}").exists(), saying="reaped")

    mood.write_text("")
    monkeypatch.setattr(dcgm_health, "PATIENCE", 30.0)
    clock.now += dcgm_health.LONGEST_PAUSE
    assert await health.check() == HEALTHY


async def test_two_requests_at_once_are_one_question(make: Make, mood: Path) -> None:
    mood.write_text("fail")
    health = make()

    first, second = await asyncio.gather(health.check(), health.check())

    assert first == second
    assert first is not None
    assert first.incidents[0].error_message.startswith("check 1 ")


async def test_stop_ends_the_process_even_one_that_hangs(make: Make, mood: Path) -> None:
    health = make()
    await health.check()
    pid = process_of(health)
    mood.write_text("hang")
    health.start()

    await health.stop()

    assert not Path(f"/proc/{pid}").exists()
    assert await health.check() is None


async def test_process_ends_when_the_daemon_is_gone(make: Make) -> None:
    """A daemon that is killed closes the pipe: the process reads the end of its input."""
    health = make()
    await health.check()
    process = health._process
    assert process is not None
    assert process.stdin is not None

    process.stdin.close()

    assert process.wait(20) == 0


async def test_no_descriptor_stays_open(make: Make, mood: Path, clock: Clock) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    health = make()
    await health.check()
    mood.write_text("crash")
    await health.check()
    await health.stop()

    assert len(list(Path("/proc/self/fd").iterdir())) == before


async def test_no_process_can_be_started(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/python")

    assert await make().check() is None
    assert "no process can be started" in caplog.text


def test_program_is_kept_in_memory() -> None:
    assert len(dcgm_health._PROGRAM) > 1000
    assert os.linesep.encode() not in dcgm_health._PROGRAM
