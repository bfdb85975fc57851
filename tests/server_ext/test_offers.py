"""Which shim is installed, from where, and what is added to dstack's requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dstack_shim_server import amending, offers
from dstack_shim_server.record.recorder import Recorder
from tests.eventually import eventually
from tests.server_ext.databases import Database
from tests.server_ext.servers import answers, components, healthcheck, tasks
from tests.server_ext.test_rollout import Fleet, ready, said

pytestmark = pytest.mark.usefixtures("all_levels")

INSTALL = "/api/components/install"
SHA = "ab" * 32
URL = "https://shims.example/{version}/{arch}"
# A task under way keeps the stand-in from restarting into what runs already.
CURRENT = answers("0.22.4", "0.22.4", "pulling")
OURS = {
    "/api/healthcheck": healthcheck("0.22.4", features=["persisted-state", "guarded-shutdown"]),
    "/api/components": components("0.22.5", features=["persisted-state"]),
    "/api/tasks": tasks(["running"]),
}


@pytest.fixture
def keepers(records_end_with_the_test: list[Recorder]) -> list[Recorder]:
    return records_end_with_the_test


def fleet_wanting(database: Database, stock: str | None = None, **choices: str) -> Fleet:
    fleet = Fleet(database, CANARIES="0", **choices)
    vars(fleet.server.check)["WANTED"] = stock
    return fleet


def installed(fleet: Fleet, documents: dict[str, Any], **more: Any) -> Any:
    """The body of the install that a check asked for, None if it asked for none."""
    client = fleet.check("a", documents, **more)
    return next((body for path, body in client.bodies if path == INSTALL), None)


def test_without_a_choice_dstacks_answers_stand(sqlite: Database, keepers: list[Recorder]) -> None:
    fleet = fleet_wanting(sqlite, stock="0.22.5")
    ready(keepers)
    body = installed(fleet, CURRENT)
    assert body == {"name": "dstack-shim", "url": "https://stock.example/0.22.5/x86"}


def test_a_version_alone_comes_from_dstacks_place(
    sqlite: Database, keepers: list[Recorder]
) -> None:
    fleet = fleet_wanting(sqlite, stock="0.22.4", VERSION="0.22.6")
    ready(keepers)
    assert installed(fleet, CURRENT)["url"] == "https://stock.example/0.22.6/x86"


def test_version_address_and_digest_are_the_operators(
    sqlite: Database, keepers: list[Recorder]
) -> None:
    chosen = {"VERSION": "0.22.5.post1", "DOWNLOAD_URL": URL, "SHA256": f"arm64={SHA[::-1]},{SHA}"}
    fleet = fleet_wanting(sqlite, stock="0.22.5", **chosen)
    ready(keepers)
    ours = {**OURS, "/api/components": components("0.22.4", features=["persisted-state"])}
    body = {"name": "dstack-shim", "url": "https://shims.example/0.22.5.post1/amd64"}
    assert installed(fleet, ours) == {**body, "sha256": SHA}
    # A shim of dstack's own has no such key.
    assert installed(fleet, CURRENT) == body


def test_single_fleets_have_their_own(sqlite: Database, keepers: list[Recorder]) -> None:
    fleets = {"main/gpu": {"version": "0.22.6", "url": URL}, "cpu": {"version": "0.22.7"}}
    fleet = fleet_wanting(sqlite, stock="0.22.4", FLEETS=json.dumps(fleets))
    keeper = ready(keepers)
    assert installed(fleet, CURRENT) is None  # their names are not known yet
    keeper.flush()
    assert installed(fleet, CURRENT)["url"] == "https://shims.example/0.22.6/amd64"
    assert installed(fleet, CURRENT, fleet_id="f2")["url"] == "https://stock.example/0.22.7/x86"
    assert installed(fleet, CURRENT, fleet_id=None) is None


def test_a_downgrade_takes_an_explicit_setting(sqlite: Database, keepers: list[Recorder]) -> None:
    fleet = fleet_wanting(sqlite, VERSION="0.22.3")
    ready(keepers)
    assert installed(fleet, CURRENT) is None
    allowing = fleet_wanting(sqlite, VERSION="0.22.3", ALLOW_DOWNGRADE="1")
    ready(keepers)
    assert installed(allowing, CURRENT)["url"].endswith("/0.22.3/x86")


def test_of_two_servers_the_one_loaded_last_counts_and_the_other_says_so(
    database: Database, keepers: list[Recorder], caplog: pytest.LogCaptureFixture
) -> None:
    older = fleet_wanting(database, stock="0.22.4", VERSION="0.22.5")
    first = ready(keepers)
    newer = fleet_wanting(database, stock="0.22.4", VERSION="0.22.6")
    second = ready(keepers)
    for fleet, keeper in ((older, first), (newer, second)) * 2:
        fleet.check("b", CURRENT)
        keeper.flush()
        assert installed(fleet, CURRENT)["url"].endswith("/0.22.6/x86") or fleet is older
    assert installed(older, CURRENT)["url"].endswith("/0.22.6/x86")
    yields = [line for line in caplog.messages if "another server, loaded later" in line]
    assert yields == [
        (
            "shim_restart: the choice of a shim yields to that of another server, loaded later: "
            f"{second.replica}"
        )
    ]


def test_a_choice_waits_until_the_record_was_read_once(
    sqlite: Database, keepers: list[Recorder]
) -> None:
    fleet = fleet_wanting(Database(sqlite.url + ".gone"), stock="0.22.5", VERSION="0.22.6")
    eventually(lambda: "no database" in keepers[-1].trouble)
    assert installed(fleet, CURRENT) is None
    plain = fleet_wanting(Database(sqlite.url + ".gone"), stock="0.22.5")
    assert installed(plain, CURRENT)["url"] == "https://stock.example/0.22.5/x86"


def test_observing_the_choice_is_dstacks(sqlite: Database, keepers: list[Recorder]) -> None:
    fleet = fleet_wanting(sqlite, stock="0.22.5", MODE="observe", VERSION="0.22.6")
    ready(keepers)
    assert installed(fleet, CURRENT)["url"] == "https://stock.example/0.22.5/x86"


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        ("x86", "amd64"),
        ("amd64", "amd64"),
        (None, "amd64"),
        ("arm", "arm64"),
        ("aarch64", "arm64"),
    ],
)
def test_architectures_have_the_names_of_downloads(arch: object, name: str) -> None:
    assert offers.plain_arch(arch) == name


# Guarded shutdown --------------------------------------------------------------------------------


def shutdown_body(client: Any) -> Any:
    return next((body for path, body in client.bodies if path == "/api/shutdown"), None)


def test_a_shim_that_can_refuse_is_asked_to(sqlite: Database, keepers: list[Recorder]) -> None:
    fleet = fleet_wanting(sqlite)
    ready(keepers)
    assert shutdown_body(fleet.check("a", OURS)) == {"force": False, "only_if_safe": True}
    plain = answers("0.22.4", "0.22.5", "running")
    assert shutdown_body(fleet.check("b", plain)) == {"force": False}


def test_a_refusal_is_false_and_never_an_exception(
    database: Database, keepers: list[Recorder], caplog: pytest.LogCaptureFixture
) -> None:
    fleet = fleet_wanting(database)
    keeper = ready(keepers)
    obstacle = {"kind": "task", "id": "x", "status": "pulling", "why": "task x is pulling"}
    refusal = (409, {"in_the_way": [obstacle]})
    fleet.check("a", {**OURS, "/api/shutdown": refusal})
    assert said(caplog, "a")[-1] == "not now: the shim refused: task x is pulling"
    keeper.flush()
    assert database.ask("SELECT * FROM shim_restart_restarts") == []  # nothing happened


@pytest.mark.parametrize(
    ("documents", "status"),
    [(OURS, 500), (answers("0.22.4", "0.22.5", "running"), 409)],
    ids=["another error", "a refusal nobody asked for"],
)
def test_any_other_answer_is_dstacks_to_judge(
    documents: dict[str, Any], status: int, sqlite: Database, keepers: list[Recorder]
) -> None:
    fleet = fleet_wanting(sqlite)
    ready(keepers)
    with pytest.raises(ConnectionError, match=str(status)):
        fleet.check("a", {**documents, "/api/shutdown": (status, {})})


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"in_the_way": 7}', b'{"in_the_way": [7]}', None]
)
def test_a_refusal_that_says_nothing_is_one_all_the_same(content: object) -> None:
    assert amending.refusal_words(content) == "it did not say why"


@pytest.mark.parametrize("features", ["guarded-shutdown", 7, None, ["guarded-shutdown", 7]])
def test_features_not_understood_are_none(
    features: object, sqlite: Database, keepers: list[Recorder]
) -> None:
    fleet = fleet_wanting(sqlite)
    ready(keepers)
    idle = answers("0.22.4", "0.22.5")
    idle["/api/healthcheck"] = healthcheck("0.22.4", features=features)
    assert shutdown_body(fleet.check("a", idle)) == {"force": False}


def test_a_body_of_either_generation_has_the_keys_more() -> None:
    class Old:
        def dict(self) -> Any:
            return {"a": 1}

    class New:
        def model_dump(self) -> Any:
            return {"a": 1}

    assert amending.Amended(Old(), {"b": 2}).dict() == {"a": 1, "b": 2}
    assert amending.Amended(New(), {"b": 2}).model_dump() == {"a": 1, "b": 2}


def test_arguments_by_name_are_amended_too(sqlite: Database, keepers: list[Recorder]) -> None:
    fleet = fleet_wanting(sqlite)
    ready(keepers)
    client = fleet.server.shim(OURS)
    client.healthcheck()
    body = fleet.server.client.Body(force=False)
    client._request(method="POST", path="/api/shutdown", body=body)
    assert shutdown_body(client) == {"force": False, "only_if_safe": True}
