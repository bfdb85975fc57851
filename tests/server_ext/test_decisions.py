"""The whole plugin on a stand-in server: what it decides, and what it says."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
from dstack_shim_contracts.statuses import TaskStatus
from hypothesis import given, settings
from hypothesis import strategies as st

from dstack_shim_server import activation
from dstack_shim_server.sightings import MAX_AGE
from tests.server_ext.servers import (
    ALLOW,
    Server,
    answers,
    components,
    healthcheck,
    tasks,
)

pytestmark = pytest.mark.usefixtures("all_levels")

OBSERVE = {**ALLOW, "DSTACK_SHIM_RESTART_MODE": "observe"}
OFF = {"DSTACK_SHIM_RESTART_MODE": "off"}

KEEPS = ["persisted-state"]
STATUSES = [status.value for status in TaskStatus]


def loaded(environment: dict[str, str] = ALLOW, *, running_is_safe: bool = False) -> Server:
    server = Server(running_is_safe=running_is_safe)
    activation.load(environment, server.import_module)
    return server


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    prefix = "shim_restart: instance box: "
    return [line.removeprefix(prefix) for line in caplog.messages if line.startswith(prefix)]


# Enforcing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("running_is_safe", [False, True])
def test_running_is_safe_if_both_sides_keep_state_whatever_dstack_says(
    *, running_is_safe: bool
) -> None:
    server = loaded(running_is_safe=running_is_safe)
    assert server.restarts(answers("0.21.3", "0.22.5", "running", "terminated"))


@pytest.mark.parametrize("running_is_safe", [False, True])
@pytest.mark.parametrize(
    ("running", "installed"),
    [("0.21.2", "0.22.5"), ("0.22.5", "0.21.2"), ("latest", "0.22.5"), ("0.22.5", "latest")],
)
def test_running_is_not_safe_if_one_side_keeps_nothing_whatever_dstack_says(
    running: str, installed: str, *, running_is_safe: bool
) -> None:
    server = loaded(running_is_safe=running_is_safe)
    assert not server.restarts(answers(running, installed, "running"))


@pytest.mark.parametrize("status", ["pending", "preparing", "pulling", "creating"])
def test_a_task_under_way_is_never_safe(status: str) -> None:
    assert not loaded().restarts(answers("0.22.5", "0.22.5.post1", "running", status))


@pytest.mark.parametrize("statuses", [(), ("terminated",), ("terminated", "terminated")])
def test_nothing_alive_is_always_safe(statuses: tuple[str, ...]) -> None:
    assert loaded().restarts(answers("0.20.29", "latest", *statuses))


def test_features_beat_versions() -> None:
    server = loaded()
    ours = {
        "/api/healthcheck": healthcheck("0.21.2", features=KEEPS),
        "/api/components": components("0.21.2.post1", features=KEEPS),
        "/api/tasks": tasks(["running"]),
    }
    assert server.restarts(ours)
    assert not server.restarts({**ours, "/api/components": components("0.22.5", features=[])})


def test_dev_builds_count_only_if_the_operator_trusts_them() -> None:
    trusting = loaded({**ALLOW, "DSTACK_SHIM_RESTART_TRUST_DEV_BUILDS": "true"})
    assert trusting.restarts(answers("latest", "1234", "running"))
    assert not loaded().restarts(answers("latest", "1234", "running"))


def test_dstacks_refusal_of_an_old_shim_stands(caplog: pytest.LogCaptureFixture) -> None:
    server = loaded()
    server.client.ShimClient.api_v2 = False
    assert not server.restarts(answers("0.22.5", "0.22.5", "terminated"))
    assert said(caplog) == [
        "not safe: dstack's own rule for shims this old, the gate was not asked"
    ]


def test_the_statuses_are_of_the_servers_own_type() -> None:
    server = loaded()
    client = server.shim(answers("0.22.5", "0.22.5", "running"))
    server.check_instance(client)
    client.get_components()
    statuses = client._get_restart_safe_task_statuses()
    assert {type(status) for status in statuses} == {server.client.TaskStatus}


@pytest.mark.parametrize(
    ("path", "answer", "why"),
    [
        ("/api/components", b"[]", "the components document has no list of components"),
        ("/api/components", {"components": {}}, "the components document has no list of"),
        ("/api/components", {"components": [1, None, "x"]}, "no installed file is reported"),
        ("/api/components", {"components": []}, "no installed file is reported"),
        ("/api/components", b"{", "/api/components did not answer JSON"),
        ("/api/healthcheck", b"{", "/api/healthcheck did not answer JSON"),
        ("/api/healthcheck", [], "running shim's healthcheck is not an object"),
        ("/api/healthcheck", healthcheck("0.22.5", features="persisted-state"), "features of"),
    ],
)
def test_documents_not_understood_leave_only_terminated_safe(
    path: str, answer: object, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = loaded(running_is_safe=True)
    assert not server.restarts({**answers("0.22.5", "0.22.5", "running"), path: answer})
    assert said(caplog)[0].startswith(f"not safe: {why}")
    assert server.restarts({**answers("0.22.5", "0.22.5", "terminated"), path: answer})


def test_two_entries_for_the_shim_are_believed_neither(
    caplog: pytest.LogCaptureFixture,
) -> None:
    twice = components("0.22.5")
    twice["components"] = [*twice["components"], *twice["components"]]  # type: ignore[misc]
    documents = {**answers("0.22.5", "0.22.5", "running"), "/api/components": twice}
    assert not loaded(running_is_safe=True).restarts(documents)
    assert said(caplog) == ["not safe: 2 components call themselves dstack-shim"]


def test_a_healthcheck_seen_too_long_ago_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    server = loaded(running_is_safe=True)
    client = server.shim(answers("0.22.5", "0.22.5", "running"))
    client.healthcheck()
    real = client.list_tasks

    def slow_list() -> Any:
        monkeypatch.setattr("time.monotonic", lambda: 10.0**9)
        return real()

    # The clock is read when it is needed, so a request that hangs makes what was before it old.
    client.list_tasks = slow_list
    assert MAX_AGE < 10.0**9
    assert not client.is_safe_to_restart()


def test_a_decision_asked_for_outside_an_instance_check_has_no_installed_file_to_go_by(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = loaded(running_is_safe=True).shim(answers("0.22.5", "0.22.5", "running"))
    client.healthcheck()
    assert not client.is_safe_to_restart()
    assert caplog.messages[-1] == (
        "shim_restart: instance (unknown): not safe: /api/components was not seen in this check"
    )


def test_no_request_is_added() -> None:
    documents = answers("0.22.5", "0.22.5", "running")
    asked = []
    for environment in (OFF, OBSERVE, ALLOW):
        server = loaded(environment, running_is_safe=True)
        client = server.shim(documents)
        server.check_instance(client)
        asked.append(client.requests)
    assert asked[0] == asked[1] == asked[2]


def test_instances_checked_at_the_same_time_do_not_mix() -> None:
    server = loaded()
    start = threading.Barrier(12)
    decided: dict[int, set[bool]] = {}

    def check(number: int) -> None:
        installed = "0.22.5" if number % 2 else "0.21.2"
        start.wait()
        decided[number] = {
            server.restarts(answers("0.22.4", installed, "running"), f"box {number}")
            for _ in range(50)
        }

    threads = [threading.Thread(target=check, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert decided == {number: {bool(number % 2)} for number in range(12)}


# Words -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("documents", "words"),
    [
        (answers("0.21.3", "0.22.5", "running"), "safe: running shim 0.21.3 and installed file"),
        (answers("0.22.5", "0.21.2", "running"), "not safe: installed file 0.21.2 keeps no state"),
        (answers("0.21.3", "0.22.5", "pulling"), "not safe: task task-0 is pulling"),
        (answers("0.21.3", "0.21.2", "terminated"), "safe: all tasks are terminated"),
        (answers("0.21.3", "0.21.2"), "safe: there are no tasks"),
        (
            {
                "/api/healthcheck": healthcheck("0.21.2", features=KEEPS),
                "/api/components": components("0.22.5", features=KEEPS),
                "/api/tasks": tasks(["running"]),
            },
            "safe: both advertise persisted-state",
        ),
    ],
)
def test_each_decision_is_logged_with_its_reason(
    documents: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    loaded().restarts(documents)
    assert len(said(caplog)) == 1
    assert said(caplog)[0].startswith(words)


def test_a_decision_is_logged_again_only_when_it_changes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = loaded()
    for status in ("pulling", "pulling", "running", "running", "pulling"):
        server.restarts(answers("0.21.3", "0.22.5", status))
    assert len(said(caplog)) == 3


def test_a_shim_cannot_forge_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    documents = answers("0.22.5\nERROR forged", "0.22.5", "running")
    documents["/api/tasks"] = {"tasks": [{"id": "x\n\x1b[2J", "status": "pulling"}]}
    loaded().restarts(documents)
    assert all(line.isprintable() for line in caplog.messages)


# Observing and off -------------------------------------------------------------------------------

VERSIONS = st.sampled_from(["0.20.29", "0.21.2", "0.21.3", "0.22.5", "latest", "", "1234"])
FEATURES: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [{}, {"features": KEEPS}, {"features": []}, {"features": None}]
)


@functools.cache
def once_loaded(mode: str, *, running_is_safe: bool) -> Server:
    """A server for hundreds of examples: making and loading one takes 20 ms, a check none."""
    environment = {**ALLOW, "DSTACK_SHIM_RESTART_MODE": mode}
    return loaded(environment, running_is_safe=running_is_safe)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "/api/healthcheck": healthcheck(draw(VERSIONS), **draw(FEATURES)),
        "/api/components": components(draw(VERSIONS), **draw(FEATURES)),
        "/api/tasks": tasks(draw(st.lists(st.sampled_from(STATUSES), max_size=3))),
    }


@pytest.mark.parametrize("mode", ["observe", "off"])
@given(shim=documents(), running_is_safe=st.booleans())
@settings(max_examples=150, deadline=None)
def test_observe_and_off_decide_as_stock(
    mode: str, shim: dict[str, Any], *, running_is_safe: bool
) -> None:
    listed = {task["status"] for task in shim["/api/tasks"]["tasks"]}
    stock = listed <= ({"terminated", "running"} if running_is_safe else {"terminated"})
    server = once_loaded(mode, running_is_safe=running_is_safe)
    assert server.restarts(shim) is stock


@given(shim=documents(), running_is_safe=st.booleans())
@settings(max_examples=300, deadline=None)
def test_enforce_never_restarts_under_a_task_that_would_not_survive(
    shim: dict[str, Any], *, running_is_safe: bool
) -> None:
    restarted = once_loaded("enforce", running_is_safe=running_is_safe).restarts(shim)
    alive = {task["status"] for task in shim["/api/tasks"]["tasks"]} - {"terminated"}
    if restarted:
        assert alive <= {"running"}
    if not alive:
        assert restarted


@pytest.mark.parametrize(
    ("running_is_safe", "installed", "words"),
    [
        (False, "0.22.4", "not safe by dstack's own rule; by the gate safe: running shim"),
        (True, "0.21.2", "safe by dstack's own rule; by the gate not safe: installed file 0.21.2"),
        (False, "0.21.2", "not safe by dstack's own rule; by the gate not safe: installed"),
    ],
)
def test_observe_says_what_dstack_and_what_the_gate_decides(
    installed: str, words: str, caplog: pytest.LogCaptureFixture, *, running_is_safe: bool
) -> None:
    loaded(OBSERVE, running_is_safe=running_is_safe).restarts(
        answers("0.22.5", installed, "running")
    )
    assert said(caplog)[0].startswith(words)
