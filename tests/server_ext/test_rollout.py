"""The whole plugin with a record, on a stand-in server: who is restarted when, and what is written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dstack_shim_server import activation, metrics
from dstack_shim_server.record.recorder import Recorder
from tests.eventually import eventually
from tests.server_ext.databases import Database
from tests.server_ext.records import outcomes
from tests.server_ext.servers import Server, answers, components, healthcheck, tasks

pytestmark = pytest.mark.usefixtures("all_levels")

KEEPS = ["persisted-state"]
SHUTDOWN = "POST /api/shutdown"
INSTANCES = "SELECT * FROM shim_restart_instances ORDER BY name"


class Fleet:
    """A server with the plugin and a record, and shims that restart when they are told to."""

    def __init__(self, database: Database, **choices: str) -> None:
        environment = {
            "DSTACK_DATABASE_URL": database.url,
            "DSTACK_SHIM_RESTART_UNKNOWN": "allow",
            **{f"DSTACK_SHIM_RESTART_{name}": value for name, value in choices.items()},
        }
        self.server = Server()
        outcome = activation.load(environment, self.server.import_module)
        assert outcome.active
        self.shims: dict[str, dict[str, Any]] = {}

    def check(self, name: str, documents: dict[str, Any] | None = None, **more: Any) -> Any:
        """One instance check; the client that made it."""
        client = self.server.shim(documents or self.shims[name])
        loaded = {"fleet_id": "f1", "jobs": [SimpleNamespace(id="task-0")], **more}
        self.server.check_instance(client, name, **loaded)
        return client

    def restarts(self, name: str, documents: dict[str, Any], **more: Any) -> bool:
        return SHUTDOWN in self.check(name, documents, **more).requests


BUSY = answers("0.22.4", "0.22.5", "running")
BACK = answers("0.22.5", "0.22.5", "running")
LOST = answers("0.22.5", "0.22.5")
IDLE = answers("0.22.4", "0.22.5")


@pytest.fixture
def keepers(records_end_with_the_test: list[Recorder]) -> list[Recorder]:
    return records_end_with_the_test


def ready(keepers: list[Recorder]) -> Recorder:
    eventually(lambda: not keepers[-1].trouble)
    return keepers[-1]


def said(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    prefix = f"shim_restart: instance {name}: "
    return [line.removeprefix(prefix) for line in caplog.messages if line.startswith(prefix)]


def test_canaries_are_confirmed_before_the_rest(
    database: Database, keepers: list[Recorder], caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet(database)
    keeper = ready(keepers)
    assert fleet.restarts("a", BUSY)
    assert not fleet.restarts("b", BUSY)
    assert said(caplog, "b") == ["not now: waits for canaries: 0 of 1 confirmed in 0.22.5"]
    for _ in range(2):
        fleet.check("a", BACK)
        keeper.flush()
    assert list(outcomes(database).values()) == ["confirmed"]
    assert fleet.restarts("b", BUSY)
    assert fleet.restarts("c", BUSY)


def test_a_version_that_loses_tasks_is_stopped_and_the_rest_are_left_alone(
    database: Database, keepers: list[Recorder], caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet(database, CANARIES="0")
    keeper = ready(keepers)
    assert fleet.restarts("a", BUSY)
    for _ in range(2):
        fleet.check("a", LOST)
        keeper.flush()
    assert not fleet.restarts("b", BUSY)
    assert not fleet.restarts("c", IDLE)
    assert said(caplog, "c")[0].startswith("not now: version 0.22.5 is stopped: instance a lost")


def test_what_a_check_saw_is_recorded(database: Database, keepers: list[Recorder]) -> None:
    fleet = Fleet(database, CANARIES="0")
    keeper = ready(keepers)
    pulling = {
        "/api/healthcheck": healthcheck("0.22.4", features=KEEPS),
        "/api/components": components("0.22.5", features=KEEPS),
        "/api/tasks": tasks(["running", "pulling"]),
    }
    assert not fleet.restarts("a", pulling)
    fleet.check("b", BACK)
    keeper.flush()
    a, b = database.ask(INSTANCES)
    assert (a["project"], a["fleet"], a["state"]) == ("main", "gpu", "waiting")
    assert (a["answer"], a["blocking"]) == (0, '{"pulling": 1}')
    assert a["reason"] == "not safe: task task-1 is pulling"
    assert (b["running_version"], b["installed_version"]) == ("0.22.5", "0.22.5")
    assert b["state"] == "current"


def test_a_shutdown_that_fails_frees_the_place(
    database: Database, keepers: list[Recorder]
) -> None:
    fleet = Fleet(database, CANARIES="0", MAX_UNDER_WAY="1")
    keeper = ready(keepers)
    with pytest.raises(ConnectionError):
        fleet.check("a", {**BUSY, "/api/shutdown": 500})
    keeper.flush()
    assert outcomes(database) == {}
    assert fleet.restarts("b", BUSY)


def test_a_shutdown_without_an_answer_may_have_been_taken(
    database: Database, keepers: list[Recorder]
) -> None:
    fleet = Fleet(database, CANARIES="0", MAX_UNDER_WAY="1")
    keeper = ready(keepers)
    with pytest.raises(OSError, match="closed mid-body"):
        fleet.check("a", {**BUSY, "/api/shutdown": OSError("closed mid-body")})
    keeper.flush()
    assert list(outcomes(database).values()) == [None]
    assert not fleet.restarts("b", BUSY)
    for _ in range(2):
        fleet.check("a", LOST)
        keeper.flush()
    assert list(outcomes(database).values()) == ["lost tasks"]


@pytest.mark.parametrize("path", ["/api/healthcheck", "/api/tasks", "/api/components"])
@pytest.mark.parametrize("failure", [OSError("hangs"), 409, 500, b"{", b""])
def test_a_shim_in_any_trouble_is_dstacks_to_judge(
    path: str, failure: Any, sqlite: Database, keepers: list[Recorder]
) -> None:
    def answer(server: Server) -> tuple[str, list[str]]:
        client = server.shim({**BUSY, path: failure})
        try:
            server.check_instance(client)
        except Exception as exception:  # noqa: BLE001  compared with what dstack alone raises
            return repr(exception), client.requests
        return "", client.requests

    stock = Server()
    fleet = Fleet(sqlite)
    ready(keepers)
    raised, asked = answer(fleet.server)
    assert (raised, asked[:2]) == (answer(stock)[0], answer(stock)[1][:2])
    assert SHUTDOWN not in asked


def test_the_same_instance_is_not_asked_twice_for_one_upgrade(
    database: Database, keepers: list[Recorder]
) -> None:
    fleet = Fleet(database, CANARIES="0")
    ready(keepers)
    assert fleet.restarts("a", BUSY)
    assert not fleet.restarts("a", BUSY)


def test_held_fleets_wait_until_their_names_are_known_and_then_too(
    database: Database, keepers: list[Recorder], caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet(database, CANARIES="0", HOLD_FLEETS="gpu")
    keeper = ready(keepers)
    assert not fleet.restarts("a", BUSY)
    keeper.flush()
    assert not fleet.restarts("a", BUSY)
    assert said(caplog, "a") == [
        "not now: the name of its fleet is not known yet",
        "not now: fleet gpu is held",
    ]
    assert fleet.restarts("c", BUSY, fleet_id="f2")


HOSTILE = "\ud800\0\x1b[2J" * 300


@pytest.mark.parametrize("status", ["running", "pulling"])
def test_a_shim_of_hostile_words_is_recorded_and_keeps_nobody_elses_record_from_being_written(
    status: str, database: Database, keepers: list[Recorder]
) -> None:
    fleet = Fleet(database, CANARIES="0")
    keeper = ready(keepers)
    upgrade = {"to_version": HOSTILE, "outcome": HOSTILE, "reason": HOSTILE, "at": HOSTILE}
    words: dict[str, Any] = {"features": [HOSTILE, *KEEPS]}
    told = {"implementation": {"name": HOSTILE[:99], "last_upgrade": {**upgrade, "x": 1}}}
    documents = {
        "/api/healthcheck": healthcheck(HOSTILE, **words, **told),
        "/api/components": components(f"2{HOSTILE}", **words),
        "/api/tasks": {"tasks": [{"id": HOSTILE, "status": status}]},
    }
    for _ in range(3):
        fleet.check("hostile", documents)
        fleet.check("other", BACK)
        keeper.flush()
    assert [row["name"] for row in database.ask(INSTANCES)] == ["hostile", "other"]
    assert not keeper.trouble


# Without a record --------------------------------------------------------------------------------


def test_without_its_database_only_what_nobody_can_be_hurt_by_is_restarted(
    sqlite: Database, keepers: list[Recorder], caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet(Database(sqlite.url + ".gone"))
    eventually(lambda: "there is no database" in keepers[-1].trouble)
    assert not fleet.restarts("a", BUSY)
    assert said(caplog, "a")[0].startswith("not now: the record cannot be used: RecordUnusable")
    assert fleet.restarts("a", IDLE)
    assert fleet.restarts("a", answers("0.22.4", "0.22.5", "terminated"))


def test_without_its_database_what_is_held_is_held(
    sqlite: Database, keepers: list[Recorder]
) -> None:
    fleet = Fleet(Database(sqlite.url + ".gone"), HOLD_INSTANCES="a")
    eventually(lambda: keepers[-1].trouble.startswith("RecordUnusable"))
    assert not fleet.restarts("a", IDLE)


def test_a_claim_that_breaks_is_no_restart_under_a_task(
    sqlite: Database, keepers: list[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(sqlite, CANARIES="0")
    ready(keepers)

    def broken(*_: Any) -> Any:
        raise OSError("theirs")

    monkeypatch.setattr(Recorder, "claim", broken)
    assert not fleet.restarts("a", BUSY)
    assert fleet.restarts("a", IDLE)


# Observing ---------------------------------------------------------------------------------------


def test_observing_records_dstacks_own_restarts_and_forbids_none(
    database: Database, keepers: list[Recorder]
) -> None:
    fleet = Fleet(database, MODE="observe", PAUSE="1", HOLD_INSTANCES="a")
    keeper = ready(keepers)
    assert fleet.restarts("a", IDLE)
    assert not fleet.restarts("b", BUSY)  # as stock
    keeper.flush()
    assert list(outcomes(database).values()) == [None]
    for _ in range(2):
        fleet.check("a", LOST)
        keeper.flush()
    assert list(outcomes(database).values()) == ["confirmed"]


# Why tasks ended ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "answer", "told"),
    [
        (("GET", "/api/tasks/x"), {"status": "terminated", "termination_reason": "a"}, "a"),
        (
            ("POST", "/api/tasks/x/terminate"),
            {"status": "terminated", "termination_reason": "b"},
            "b",
        ),
        (("POST", "/api/tasks/x/remove"), b"\n", "removed by dstack"),
        (("GET", "/api/tasks/x"), {"status": "running", "termination_reason": ""}, None),
        (("GET", "/api/tasks/x"), {"status": "terminated", "termination_reason": 7}, None),
        (("GET", "/api/tasks/x"), b'"terminated"', None),
        (("GET", "/api/tasks/x"), b'{"terminated"', None),
        (("GET", "/api/tasks/x"), 404, None),
    ],
)
def test_whoever_is_told_why_a_task_ended_the_record_hears_it(
    request_: tuple[str, str],
    answer: Any,
    told: str | None,
    sqlite: Database,
    keepers: list[Recorder],
) -> None:
    fleet = Fleet(sqlite)
    keeper = ready(keepers)
    client = fleet.server.shim({request_[1]: answer})
    client._request(*request_)
    assert keeper.notes.reasons().get("x") == told


def test_a_removed_task_is_no_loss(database: Database, keepers: list[Recorder]) -> None:
    fleet = Fleet(database, CANARIES="0")
    keeper = ready(keepers)
    assert fleet.restarts("a", BUSY)
    fleet.server.shim({})._request("POST", "/api/tasks/task-0/remove")
    for _ in range(2):
        fleet.check("a", LOST)
        keeper.flush()
    assert list(outcomes(database).values()) == ["confirmed"]


# Figures -----------------------------------------------------------------------------------------


def test_the_servers_metrics_have_ours(database: Database, keepers: list[Recorder]) -> None:
    fleet = Fleet(database)
    keeper = ready(keepers)
    fleet.check("a", BUSY)
    fleet.check("b", BUSY)
    keeper.flush()
    (collector,) = fleet.server.modules["prometheus_client"].REGISTRY.collectors
    samples = {
        (name, *labels.values()): value
        for metric in collector.collect()
        for name, labels, value in metric.samples
    }
    assert samples["dstack_shim_restart_decisions_total", "restart"] == 1
    assert samples["dstack_shim_restart_decisions_total", "wait for others"] == 1
    assert samples["dstack_shim_restart_restarts_under_way",] == 1
    assert samples["dstack_shim_restart_instances", "restarting"] == 1
    assert samples["dstack_shim_restart_instances", "held"] == 1


def test_loaded_again_the_figures_are_those_of_the_last_load(
    sqlite: Database, keepers: list[Recorder]
) -> None:
    fleet = Fleet(sqlite)
    ready(keepers)
    client = fleet.server.modules["prometheus_client"]
    (before,) = client.REGISTRY.collectors
    for _ in range(2):
        metrics.register(client, keepers[0], before.tally)
    (after,) = client.REGISTRY.collectors
    assert after is not before


def test_figures_that_fail_do_not_take_the_servers_own_along(
    sqlite: Database, keepers: list[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(sqlite)
    ready(keepers).snapshot = None  # type: ignore[assignment]
    (collector,) = fleet.server.modules["prometheus_client"].REGISTRY.collectors
    assert collector.collect() == []


def test_a_decision_outside_a_check_claims_nothing(
    sqlite: Database, keepers: list[Recorder]
) -> None:
    fleet = Fleet(sqlite, CANARIES="0")
    keeper = ready(keepers)
    client = fleet.server.shim(IDLE)
    client.healthcheck()
    assert client.is_safe_to_restart()
    keeper.flush()
    assert outcomes(sqlite) == {}
