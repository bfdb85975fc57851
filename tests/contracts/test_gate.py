"""The gate: which tasks survive a restart, as a truth table, and the reasons in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
from dstack_shim_contracts.api import (
    Component,
    ComponentStatus,
    HealthcheckResponse,
    Implementation,
    TaskListItem,
)
from dstack_shim_contracts.gate import ALWAYS_SAFE, Verdict, decide, may_restart
from dstack_shim_contracts.statuses import TaskStatus
from hypothesis import given
from hypothesis import strategies as st

from tests.contracts.strategies import JSON_VALUES, SAMPLE

SAFE = frozenset({TaskStatus.TERMINATED, TaskStatus.RUNNING})
ABSENT = object()
OURS = ["persisted-state"]

# What a side reports as version and features, and whether it keeps state, with and without trust in
# development builds.
SIDES: list[tuple[str, object, object, bool, bool]] = [
    # the word decides, whatever the version
    ("advertises", "0.22.5", OURS, True, True),
    ("advertises-old-version", "0.21.2", OURS, True, True),
    ("advertises-latest", "latest", OURS, True, True),
    ("advertises-no-version", "", OURS, True, True),
    ("advertises-more", "0.22.5", ["later", "persisted-state"], True, True),
    ("advertises-twice", "0.22.5", OURS * 2, True, True),
    ("advertises-among-10000", "0.22.5", ["later"] * 9999 + OURS, True, True),
    ("advertises-nothing", "0.22.5", [], False, False),
    ("advertises-another", "0.22.5", ["later"], False, False),
    ("advertises-in-capitals", "0.22.5", ["Persisted-State"], False, False),
    ("advertises-10000-others", "0.22.5", ["later"] * 10_000, False, False),
    ("advertises-nothing-latest", "latest", [], False, False),
    # no word: dstack's own shims by version
    ("0.21.3", "0.21.3", ABSENT, True, True),
    ("0.21.3.post1", "0.21.3.post1", ABSENT, True, True),
    ("0.21.3+local", "0.21.3+local", ABSENT, True, True),
    ("0.21.4.dev1", "0.21.4.dev1", ABSENT, True, True),
    ("0.22.5", "0.22.5", ABSENT, True, True),
    ("1.0", "1.0", ABSENT, True, True),
    ("0.20.29", "0.20.29", ABSENT, False, False),
    ("0.21.2", "0.21.2", ABSENT, False, False),
    ("0.21.2.post9", "0.21.2.post9", ABSENT, False, False),
    ("0.21.2+local", "0.21.2+local", ABSENT, False, False),
    ("0.21.3rc1", "0.21.3rc1", ABSENT, False, False),
    ("0.21.3.dev1", "0.21.3.dev1", ABSENT, False, False),
    ("0.0.0", "0.0.0", ABSENT, False, False),
    # no release
    ("latest", "latest", ABSENT, False, True),
    ("empty", "", ABSENT, False, True),
    ("bare-number", "12345", ABSENT, False, True),
    ("unparsable", "main@1a2b3c4", ABSENT, False, True),
    ("spaces", " 0.21.3", ABSENT, False, True),
    ("very-long", "9." * 100_000, ABSENT, False, True),
    # malformed
    ("features-null", "0.22.5", None, False, False),
    ("features-string", "0.22.5", "persisted-state", False, False),
    ("features-number", "0.22.5", 1, False, False),
    ("features-true", "0.22.5", True, False, False),
    ("features-object", "0.22.5", {"persisted-state": True}, False, False),
    ("features-nested", "0.22.5", [OURS], False, False),
    ("features-mixed", "0.22.5", [1, "persisted-state"], False, False),
    ("features-with-null", "0.22.5", [None, "persisted-state"], False, False),
    ("version-null", None, OURS, False, False),
    ("version-number", 21, ABSENT, False, False),
    ("version-list", ["0.22.5"], ABSENT, False, False),
    ("version-absent", ABSENT, ABSENT, False, False),
    ("version-absent-advertises", ABSENT, OURS, False, False),
]


# Enough of them for the other side of the table: every kind of yes and of no.
TARGET_NAMES = {
    "advertises",
    "advertises-old-version",
    "advertises-latest",
    "advertises-nothing",
    "0.21.3",
    "0.21.4.dev1",
    "0.21.2",
    "0.21.2.post9",
    "0.21.3rc1",
    "latest",
    "empty",
    "bare-number",
    "features-null",
    "features-string",
    "features-nested",
    "version-absent",
}
TARGETS = [side for side in SIDES if side[0] in TARGET_NAMES]


def members(version: object, features: object) -> dict[str, object]:
    given_ = {"version": version, "features": features}
    return {key: value for key, value in given_.items() if value is not ABSENT}


def healthcheck(version: object, features: object = ABSENT) -> dict[str, object]:
    return {"service": "dstack-shim", **members(version, features)}


def component(version: object, features: object = ABSENT) -> dict[str, object]:
    return {"name": "dstack-shim", "status": "installed", **members(version, features)}


def rows() -> Iterator[Any]:
    for running, version, features, keeps, _ in SIDES:
        for installed, target, target_features, target_keeps, _ in TARGETS:
            yield pytest.param(
                healthcheck(version, features),
                component(target, target_features),
                keeps and target_keeps,
                id=f"{running}-to-{installed}",
            )


@pytest.mark.parametrize(("running", "installed", "safe"), list(rows()))
def test_running_tasks_are_safe_only_if_both_sides_keep_state(
    running: object, installed: object, safe: bool
) -> None:
    verdict = decide(running, installed)
    assert verdict.statuses == (SAFE if safe else ALWAYS_SAFE)
    assert verdict.reason.startswith("safe: " if safe else "not safe: ")


@pytest.mark.parametrize(
    ("version", "features", "keeps"),
    [side[1:3] + side[4:] for side in SIDES],
    ids=[s[0] for s in SIDES],
)
def test_trust_in_dev_builds_covers_versions_without_a_place_and_nothing_else(
    version: object, features: object, keeps: bool
) -> None:
    running, installed = healthcheck(version, features), component(version, features)
    good = healthcheck("0.22.5"), component("0.22.5")
    expected = SAFE if keeps else ALWAYS_SAFE
    assert decide(running, good[1], trust_dev_builds=True).statuses == expected
    assert decide(good[0], installed, trust_dev_builds=True).statuses == expected


NO_DOCUMENT: list[object] = [None, [], "dstack-shim", 1, 1.5, True, {}, object(), [OURS], b"{}"]


@pytest.mark.parametrize("document", NO_DOCUMENT, ids=repr)
@pytest.mark.parametrize("trust", [False, True])
def test_what_is_no_document_is_not_safe(document: object, trust: bool) -> None:
    good = healthcheck("0.22.5", OURS), component("0.22.5", OURS)
    for running, installed in ((document, good[1]), (good[0], document)):
        verdict = decide(running, installed, trust_dev_builds=trust)
        assert verdict.statuses == ALWAYS_SAFE
        assert verdict.reason.startswith("not safe: ")


@pytest.mark.parametrize("service", [None, "", "dstack-runner", "DSTACK-SHIM", 1, ["dstack-shim"]])
def test_another_service_is_not_safe(service: object) -> None:
    running = {**healthcheck("0.22.5", OURS), "service": service}
    verdict = decide(running, component("0.22.5", OURS))
    assert verdict == Verdict(ALWAYS_SAFE, "not safe: running service is not dstack-shim")


@pytest.mark.parametrize("name", [None, "", "dstack-runner", 1])
def test_another_component_is_not_safe(name: object) -> None:
    installed = {**component("0.22.5", OURS), "name": name}
    verdict = decide(healthcheck("0.22.5", OURS), installed)
    assert verdict == Verdict(ALWAYS_SAFE, "not safe: installed file is not dstack-shim")


@pytest.mark.parametrize(
    ("status", "shown"),
    [
        ("installing", "installing"),
        ("not-installed", "not-installed"),
        ("error", "error"),
        ("made-up-later", "made-up-later"),
        (None, "of unknown status"),
        (1, "of unknown status"),
        (["installed"], "of unknown status"),
    ],
)
def test_a_file_that_is_not_installed_is_not_safe(status: object, shown: str) -> None:
    installed = {**component("0.22.5", OURS), "status": status}
    verdict = decide(healthcheck("0.22.5", OURS), installed)
    assert verdict == Verdict(ALWAYS_SAFE, f"not safe: installed file is {shown}")


@pytest.mark.parametrize(
    ("running", "installed", "reason"),
    [
        (
            healthcheck("0.21.2", OURS),
            component("0.22.5", OURS),
            "safe: both advertise persisted-state",
        ),
        (
            healthcheck("0.21.3"),
            component("0.21.5"),
            "safe: running shim 0.21.3 and installed file 0.21.5 keep state",
        ),
        (
            healthcheck("0.21.2", OURS),
            component("0.21.5"),
            (
                "safe: running shim 0.21.2 advertises persisted-state, "
                "installed file 0.21.5 keeps state"
            ),
        ),
        (
            healthcheck("0.22.5", OURS),
            component("0.21.2"),
            "not safe: installed file 0.21.2 keeps no state",
        ),
        (
            healthcheck("0.21.2"),
            component("0.22.5", OURS),
            "not safe: running shim 0.21.2 keeps no state",
        ),
        (
            healthcheck("0.20.29"),
            component("0.21.2"),
            "not safe: running shim 0.20.29 and installed file 0.21.2 keep no state",
        ),
        (
            healthcheck("0.20.29"),
            component("latest"),
            (
                "not safe: running shim 0.20.29 keeps no state, "
                "installed file latest is no release, and dev builds are not trusted"
            ),
        ),
        (
            healthcheck("0.22.5", []),
            component("0.22.5"),
            "not safe: running shim 0.22.5 does not advertise persisted-state",
        ),
        (
            healthcheck("0.22.5"),
            component("0.22.5", None),
            "not safe: features of installed file 0.22.5 are unknown",
        ),
        (
            healthcheck("0.22.5", "persisted-state"),
            component("0.22.5"),
            "not safe: features of running shim 0.22.5 are not a list of words",
        ),
        (
            healthcheck("0.22.5"),
            component(""),
            (
                "not safe: installed file of unknown version is no release, "
                "and dev builds are not trusted"
            ),
        ),
        (
            healthcheck(7),
            component("0.22.5"),
            "not safe: version of the running shim is not a string",
        ),
        (healthcheck("0.22.5"), None, "not safe: no installed file is reported"),
        ([], component("0.22.5"), "not safe: running shim's healthcheck is not an object"),
        (healthcheck("0.22.5"), [], "not safe: entry of the installed file is not an object"),
    ],
)
def test_the_reason_says_what_is_missing(running: object, installed: object, reason: str) -> None:
    assert decide(running, installed).reason == reason


def test_a_reason_is_one_short_line_whatever_the_shim_reports() -> None:
    hostile = "0.21.2\n\x1b[31m2026 level=error " + "x" * 1_000_000
    reason = decide(healthcheck(hostile), component(hostile)).reason
    assert reason.isprintable()
    assert len(reason) < 300


def test_models_are_judged_as_what_they_are_on_the_wire() -> None:
    implementation = Implementation("dstack-shim", "0.1.0", 0, "2026-02-03T04:05:06Z")
    running = HealthcheckResponse("dstack-shim", "0.21.2", tuple(OURS), implementation)
    installed = Component("dstack-shim", "0.22.5", ComponentStatus.INSTALLED, tuple(OURS))
    assert decide(running, installed).statuses == SAFE
    stock = HealthcheckResponse("dstack-shim", "0.21.3")
    assert decide(stock, installed).statuses == SAFE
    # Our shim says null when it does not know what the file can do.
    unknown = attrs.evolve(installed, features=None)
    assert decide(running, unknown).statuses == ALWAYS_SAFE


class Hostile(dict[str, object]):
    """A document that raises on every question."""

    def get(self, *_: object) -> Any:
        raise RuntimeError("no")


def test_a_document_that_raises_is_not_safe() -> None:
    verdict = decide(Hostile(), component("0.22.5"))
    assert verdict == Verdict(ALWAYS_SAFE, "not safe: documents cannot be judged (RuntimeError)")


@SAMPLE
@given(JSON_VALUES, JSON_VALUES, st.booleans())
def test_no_json_makes_it_fail_or_safe(running: object, installed: object, trust: bool) -> None:
    assert decide(running, installed, trust_dev_builds=trust).statuses == ALWAYS_SAFE


@SAMPLE
@given(JSON_VALUES, JSON_VALUES, st.booleans())
def test_no_members_make_it_fail(version: object, features: object, trust: bool) -> None:
    decide(healthcheck(version, features), component("0.22.5"), trust_dev_builds=trust)
    decide(healthcheck("0.22.5"), component(version, features), trust_dev_builds=trust)


# --- with the list of tasks

BOTH = Verdict(SAFE, "safe: both advertise persisted-state")
NO_TARGET = Verdict(ALWAYS_SAFE, "not safe: installed file 0.21.2 keeps no state")


def tasks(*statuses: str) -> list[dict[str, str]]:
    return [
        {"id": f"{number}f2b8c1e-5a77-4c0e", "status": status}
        for number, status in enumerate(statuses)
    ]


@pytest.mark.parametrize(
    ("verdict", "statuses", "restart", "reason"),
    [
        (BOTH, (), True, "safe: there are no tasks"),
        (NO_TARGET, (), True, "safe: there are no tasks"),
        (NO_TARGET, ("terminated",), True, "safe: all tasks are terminated"),
        (BOTH, ("terminated", "terminated"), True, "safe: all tasks are terminated"),
        (BOTH, ("running",), True, "safe: both advertise persisted-state"),
        (BOTH, ("terminated", "running"), True, "safe: both advertise persisted-state"),
        (NO_TARGET, ("running",), False, "not safe: installed file 0.21.2 keeps no state"),
        (BOTH, ("pending",), False, "not safe: task 0f2b8c1e… is pending"),
        (BOTH, ("running", "preparing"), False, "not safe: task 1f2b8c1e… is preparing"),
        (BOTH, ("pulling",), False, "not safe: task 0f2b8c1e… is pulling"),
        (BOTH, ("creating",), False, "not safe: task 0f2b8c1e… is creating"),
        (
            BOTH,
            ("pulling", "running", "creating"),
            False,
            "not safe: task 0f2b8c1e… is pulling, and 1 more",
        ),
        (
            NO_TARGET,
            ("running", "pulling"),
            False,
            "not safe: task 1f2b8c1e… is pulling, and 1 more",
        ),
    ],
)
def test_a_restart_waits_for_every_task_that_would_not_survive(
    verdict: Verdict, statuses: tuple[str, ...], restart: bool, reason: str
) -> None:
    decision = may_restart(verdict, tasks(*statuses))
    assert (decision.restart, decision.reason) == (restart, reason)
    in_the_way = {status for status in statuses if TaskStatus(status) not in verdict.statuses}
    assert {item.status.value for item in decision.blocking} == in_the_way


def test_the_tasks_in_the_way_are_named() -> None:
    decision = may_restart(BOTH, tasks("running", "pulling", "creating"))
    assert decision.blocking == (
        TaskListItem("1f2b8c1e-5a77-4c0e", TaskStatus.PULLING),
        TaskListItem("2f2b8c1e-5a77-4c0e", TaskStatus.CREATING),
    )


def test_items_may_be_models() -> None:
    item = TaskListItem("short", TaskStatus.PULLING)
    assert may_restart(BOTH, (item,)).reason == "not safe: task short is pulling"


def raising() -> Iterator[object]:
    yield {"id": "a", "status": "terminated"}
    raise RuntimeError("no")


@pytest.mark.parametrize(
    "listed",
    [
        None,
        1,
        "abc",
        b"abc",
        {"tasks": []},
        [None],
        ["a"],
        [["a", "running"]],
        [{"id": "a"}],
        [{"status": "terminated"}],
        [{"id": None, "status": "terminated"}],
        [{"id": "a", "status": "exited"}],
        [{"id": "a", "status": ["running"]}],
        raising(),
    ],
    ids=repr,
)
def test_a_list_that_cannot_be_read_means_no(listed: object) -> None:
    decision = may_restart(BOTH, listed)
    assert (decision.restart, decision.reason) == (
        False,
        "not safe: the list of tasks is malformed",
    )


@SAMPLE
@given(JSON_VALUES)
def test_no_list_makes_it_fail(listed: object) -> None:
    assert may_restart(BOTH, listed).restart is (listed == [])
