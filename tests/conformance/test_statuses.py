"""S: statuses, reasons, and how a task ends."""

from __future__ import annotations

import re
import threading
import time
from datetime import datetime
from typing import Any

import docker
import pytest

from tests.conformance.engine import Reply, Request, Wire, refusal
from tests.conformance.images import Images, tell
from tests.conformance.pulls import endless
from tests.conformance.rows import row
from tests.conformance.shim import Shim, Task
from tests.eventually import eventually

ORDER = ("pending", "preparing", "pulling", "creating", "running", "terminated")
OWN_REASONS = {
    "executor_error",
    "creating_container_error",
    "container_exited_with_error",
    "done_by_runner",
}


@row("S1", "S2", "S3")
def test_statuses_come_in_order(shim: Shim, images: Images, wire: Wire) -> None:
    seen: list[str] = []

    def slowly(_request: Request) -> None:
        before = time.monotonic()
        eventually(lambda: time.monotonic() - before > 0.2)

    with (
        wire.rule("POST", "^/containers/create", slowly),
        wire.rule("GET", "^/images/", slowly),
        wire.rule("POST", "^/containers/[^/]+/start", slowly),
    ):
        task = shim.submit(images.job("sleep 0.5"))
        while not seen or seen[-1] != "terminated":
            status = task.status
            if not seen or seen[-1] != status:
                seen.append(status)
    assert set(seen) <= set(ORDER)
    assert seen == sorted(seen, key=ORDER.index)
    assert seen[-2:] == ["running", "terminated"]


@row("S3")
def test_submit_does_not_wait_for_the_start(shim: Shim, images: Images, wire: Wire) -> None:
    go_on = threading.Event()

    def hold(request: Request) -> None:
        go_on.wait(20)

    with wire.rule("POST", "^/containers/create", hold):
        before = time.monotonic()
        task = shim.submit(images.idle)
        assert time.monotonic() - before < 3
        assert task.status in ORDER[:4]
        go_on.set()
        task.reach("running")


@row("S4", "R37")
def test_running_task_names_its_container(shim: Shim, images: Images, container_of: Any) -> None:
    task = shim.run(images.idle)
    container = container_of(task)
    assert task.info()["container_id"] == container.id
    eventually(lambda: container_of(task).status == "running", within=3)


@row("S5")
def test_code_0_is_done_by_runner(shim: Shim, images: Images) -> None:
    assert shim.submit(images.exits(0, "all is well")).outcome() == ("done_by_runner", "")


@row("S6")
@pytest.mark.parametrize("code", [1, 7, 126, 255])
def test_other_codes_are_errors_with_the_last_lines(code: int, shim: Shim, images: Images) -> None:
    image = images.job(f"for n in 1 2 3 4 5 6 7 8; do echo line $n; done; exit {code}")
    reason, message = shim.submit(image).outcome()
    assert reason == "container_exited_with_error"
    assert message.splitlines() == ["line 4", "line 5", "line 6", "line 7", "line 8"]


@row("S6")
def test_last_lines_hold_both_streams(shim: Shim, images: Images) -> None:
    image = images.job("echo out; sleep 0.1; echo err >&2; exit 3")
    _, message = shim.submit(image).outcome()
    assert sorted(message.splitlines()) == ["err", "out"]


@row("S6")
def test_silent_failure_is_an_error_like_any_other(shim: Shim, images: Images) -> None:
    assert shim.submit(images.exits(97)).outcome()[0] == "container_exited_with_error"


@row("S24")
def test_silent_failure_names_its_code(shim: Shim, images: Images) -> None:
    assert "97" in shim.submit(images.exits(97)).outcome()[1]


@row("S6")
def test_killed_container_is_an_error(shim: Shim, images: Images, container_of: Any) -> None:
    task = shim.run(images.idle)
    container_of(task).kill()
    assert task.outcome()[0] == "container_exited_with_error"


@row("S7")
@pytest.mark.parametrize(
    ("output", "part"),
    [
        (r"bad \377\376 bytes\nno newline", "no newline"),
        (r"a\rb\tc\001d", "a\rb\tc\x01d"),
        (r"\303\274 \360\237\220\247", "ü 🐧"),
    ],
)
def test_odd_output_breaks_nothing(output: str, part: str, shim: Shim, images: Images) -> None:
    reason, message = shim.submit(images.exits(4, output)).outcome()
    assert reason == "container_exited_with_error"
    assert part in message
    assert set(shim.task_list().values()) == {"terminated"}


@row("S7")
def test_endless_line_breaks_nothing(shim: Shim, images: Images) -> None:
    image = images.job("head -c 300000 /dev/zero | tr '\\0' x; echo; echo end; exit 4")
    task = shim.submit(image)
    assert task.outcome()[0] == "container_exited_with_error"


@row("S8")
def test_container_that_cannot_start_is_an_error(shim: Shim, images: Images) -> None:
    reason, _ = shim.submit(images.idle, container_user="nobody-of-that-name").outcome()
    assert reason == "container_exited_with_error"


@row("S9")
def test_image_that_cannot_be_pulled_says_why(shim: Shim) -> None:
    reason, message = shim.submit("127.0.0.1:1/none/such:1").outcome()
    assert reason == "creating_container_error"
    assert "refused" in message


@row("S10")
def test_container_that_cannot_be_created_says_why(shim: Shim, images: Images) -> None:
    reason, message = shim.submit(images.idle, memory=1024).outcome()
    assert reason == "creating_container_error"
    assert "memory" in message.lower()


@row("S10")
def test_the_engines_own_words_are_kept(shim: Shim, images: Images, wire: Wire) -> None:
    with wire.rule("POST", "^/containers/create", lambda _: refusal(500, "the moon is full")):
        reason, message = shim.submit(images.idle).outcome()
    assert reason == "creating_container_error"
    assert "the moon is full" in message


@row("S11")
def test_failed_preparation_says_why(shim: Shim, images: Images) -> None:
    volume = {"backend": "azure", "name": "v", "volume_id": "v-1", "init_fs": False}
    reason, message = shim.submit(images.idle, volumes=[volume]).outcome()
    assert reason == "executor_error"
    assert "azure" in message


@row("S12")
def test_vanished_container_is_an_executor_error(
    shim: Shim, images: Images, container_of: Any
) -> None:
    task = shim.run(images.idle)
    with shim.paused():  # or it may see that the container was killed, before it went
        container_of(task).remove(force=True)
    assert task.outcome() == ("executor_error", "container not found")


@row("S13")
def test_first_reason_stays(shim: Shim, images: Images) -> None:
    task = shim.run(images.idle)
    task.terminate("terminated_by_user", "by a user")
    info = task.terminate("max_duration_exceeded", "too long").json()
    assert (info["termination_reason"], info["termination_message"]) == (
        "terminated_by_user",
        "by a user",
    )
    assert task.outcome() == ("terminated_by_user", "by a user")


@row("S13")
@pytest.mark.parametrize("code", [0, 5])
def test_reason_of_the_container_stays_too(code: int, shim: Shim, images: Images) -> None:
    task = shim.submit(images.exits(code, "last words"))
    before = task.outcome()
    assert task.terminate("terminated_by_server", "clean up").status_code == 200
    assert task.outcome() == before


@row("S13")
def test_reason_of_terminate_is_not_replaced_by_the_exit(
    shim: Shim, images: Images, container_of: Any
) -> None:
    task = shim.run(images.idle)
    task.terminate("terminated_by_user", "")
    assert container_of(task).attrs["State"]["ExitCode"] == 137
    other = shim.run(images.idle, name="other")  # gives the shim a look at the engine
    assert task.outcome() == ("terminated_by_user", "")
    other.terminate()
    assert task.outcome() == ("terminated_by_user", "")


@row("S14")
def test_empty_reason_ends_the_task_and_records_nothing(shim: Shim, images: Images) -> None:
    task = shim.run(images.idle)
    first = task.terminate("", "").json()
    assert (first["status"], first["termination_reason"]) == ("terminated", "")
    second = task.terminate("terminated_by_server", "really").json()
    assert (second["termination_reason"], second["termination_message"]) == (
        "terminated_by_server",
        "really",
    )


@row("S14", "A41")
def test_task_ended_without_a_reason_can_be_removed(shim: Shim, images: Images) -> None:
    task = shim.run(images.idle)
    task.terminate("", "")
    assert task.status == "terminated"
    assert task.remove().status_code == 200


@row("S15")
@pytest.mark.parametrize(
    "reason", ["log_quota_exceeded", "anything at all", "ü 'quoted' $x", "x" * 5000]
)
def test_any_reason_is_kept_as_it_came(reason: str, shim: Shim, images: Images) -> None:
    task = shim.run(images.idle)
    task.terminate(reason, "a\nmessage\twith 'all' \"sorts\" of ü")
    assert task.outcome() == (reason, "a\nmessage\twith 'all' \"sorts\" of ü")


@row("S15")
def test_own_reasons_are_known_ones(shim: Shim, images: Images) -> None:
    tasks = [
        shim.submit(images.exits(0)),
        shim.submit(images.exits(1), name="fails"),
        shim.submit(images.idle, name="no-memory", memory=1),
        shim.submit("127.0.0.1:1/none:1", name="no-image"),
    ]
    assert {task.outcome()[0] for task in tasks} <= OWN_REASONS


@row("S16", "S17")
def test_terminate_stops_a_pull_within_a_second(shim: Shim, wire: Wire) -> None:
    closed = threading.Event()
    with wire.rule("POST", "^/images/create", lambda _: Reply(script=endless(closed))):
        task = shim.submit("conformance/endless:1").reach("pulling")
        eventually(lambda: task.info()["image_pull_progress"], within=5)
        before = time.monotonic()
        assert task.terminate("terminated_by_user").json()["status"] == "terminated"
        assert closed.wait(5)
        assert time.monotonic() - before < 1
    assert task.outcome()[0] == "terminated_by_user"


@row("S16", "S13")
def test_terminate_while_pulling_keeps_its_reason(
    shim: Shim, wire: Wire, engine: docker.DockerClient
) -> None:
    closed = threading.Event()
    with wire.rule("POST", "^/images/create", lambda _: Reply(script=endless(closed))):
        task = shim.submit("conformance/endless:1").reach("pulling")
        eventually(lambda: task.info()["image_pull_progress"], within=5)
        task.terminate("max_duration_exceeded", "slow")
        assert closed.wait(8)
    assert task.outcome() == ("max_duration_exceeded", "slow")
    assert task.remove().status_code == 200
    assert engine.containers.list(all=True) == []


@row("S18")
def test_timeout_0_kills_at_once(shim: Shim, images: Images, container_of: Any) -> None:
    task = shim.run(images.idle)
    before = time.monotonic()
    assert task.terminate(timeout=0).status_code == 200
    assert time.monotonic() - before < 2
    assert container_of(task).attrs["State"]["ExitCode"] == 137


@row("S18")
def test_timeout_is_a_grace_between_signal_and_kill(
    shim: Shim, images: Images, engine: docker.DockerClient
) -> None:
    task = shim.run(images.idle)
    start = time.time()
    assert task.terminate(timeout=2).status_code == 200
    assert 1.9 <= time.time() - start < 5
    kills = [
        (event["Actor"]["Attributes"]["signal"], event["timeNano"] / 1e9 - start)
        for event in engine.events(
            since=int(start), until=int(time.time()) + 1, decode=True, filters={"event": "kill"}
        )
        if event["Actor"]["Attributes"]["name"] == task.container_name
    ]
    assert [sign for sign, _ in kills] == ["15", "9"]
    assert kills[0][1] < 1.5 < kills[1][1]


@row("S18")
def test_stop_ends_as_soon_as_the_container_does(
    shim: Shim, images: Images, container_of: Any
) -> None:
    task = shim.run(images.idle)
    container = container_of(task)
    ended = threading.Timer(0.7, tell, (container, 0))
    ended.start()
    before = time.monotonic()
    assert task.terminate("terminated_by_user", timeout=8).status_code == 200
    assert time.monotonic() - before < 5
    assert task.status == "terminated"


@row("S19")
def test_paused_container_counts_as_running(shim: Shim, images: Images, container_of: Any) -> None:
    task, other = shim.run(images.idle), shim.run(images.idle, name="other")
    container_of(task).pause()
    tell(container_of(other), 0)
    other.end()  # the shim has looked at the engine since
    assert task.status == "running"
    assert task.terminate().status_code == 200
    assert container_of(task).status == "exited"


@row("S20")
def test_terminate_without_container_is_a_success(
    shim: Shim, images: Images, container_of: Any
) -> None:
    task = shim.run(images.idle)
    container_of(task).remove(force=True)
    answer = task.terminate()
    assert answer.status_code == 200
    assert answer.json()["status"] == "terminated"


@row("S21")
@pytest.mark.parametrize("at", ["create", "start"])
def test_task_terminated_before_its_start_never_runs(
    at: str, shim: Shim, images: Images, wire: Wire, engine: docker.DockerClient
) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def hold(request: Request) -> None:
        asked.set()
        go_on.wait(20)

    path = "^/containers/create" if at == "create" else r"^/containers/[^/]+/start"
    with wire.rule("POST", path, hold):
        task = shim.submit(images.idle)
        assert asked.wait(10)
        ending = threading.Thread(target=task.terminate, args=("terminated_by_user",))
        ending.start()
        # The shim may answer at once or once the start has come back; both are fine.
        ending.join(1)
        go_on.set()
        ending.join(15)
    assert task.outcome() == ("terminated_by_user", "")
    _nothing_runs(task, engine)


@row("S22")
def test_end_is_noticed_within_3_seconds(shim: Shim, images: Images, container_of: Any) -> None:
    assert _notice_time(shim.run(images.idle), container_of) < 3


@row("S23")
def test_end_is_noticed_within_1_second(shim: Shim, images: Images, container_of: Any) -> None:
    assert _notice_time(shim.run(images.idle), container_of) < 1


def _notice_time(task: Task, container_of: Any) -> float:
    """Seconds from the end of the container to the end of the task."""
    tell(container_of(task), 0)
    task.end()
    noticed = time.time()
    finished = container_of(task).attrs["State"]["FinishedAt"]
    whole = re.sub(r"(\.\d{6})\d*Z$", r"\1+00:00", finished)
    return noticed - datetime.fromisoformat(whole).timestamp()


def _nothing_runs(task: Task, engine: docker.DockerClient) -> None:
    """No container of the task runs, and none comes within two more looks at the engine."""
    label = f"ai.dstack.shim.task-id={task.id}"
    until = time.monotonic() + 2.5
    while time.monotonic() < until:
        assert engine.containers.list(filters={"label": label}) == []
        time.sleep(0.1)  # nothing to wait for: it must not come
