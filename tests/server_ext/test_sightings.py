from __future__ import annotations

import copy
import gc
import json
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from dstack_shim_server.sightings import (
    COMPONENTS,
    HEALTHCHECK,
    MAX_AGE,
    MAX_BODY,
    TASKS,
    Unusable,
    Watch,
)


class Client:
    """Something to be the key; dstack's client is as plain."""


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> Watch:
    return Watch(clock=clock)


def response(content: object = b"{}", status: int = 200) -> Any:
    return SimpleNamespace(status_code=status, content=content)


def saw(watch: Watch, client: object, path: str, document: object) -> None:
    watch.answered(client, ("GET", path), {}, response(json.dumps(document).encode()))


@pytest.mark.parametrize("path", [HEALTHCHECK, COMPONENTS, TASKS])
def test_the_three_documents_are_kept_as_they_came(watch: Watch, path: str) -> None:
    client = Client()
    saw(watch, client, path, {"unknown": ["to", "dstack"]})
    assert watch.of(client).document(path, watch.clock()) == {"unknown": ["to", "dstack"]}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/tasks/1"),
        ("GET", "/api/instance/health"),
        ("POST", "/api/tasks"),
        ("POST", "/api/components/install"),
        ("GET", None),
        (None, HEALTHCHECK),
    ],
)
def test_other_requests_are_none_of_ours(watch: Watch, method: object, path: object) -> None:
    client = Client()
    watch.answered(client, (method, path), {}, response())
    assert watch.of(client).bodies == {}


def test_a_request_made_with_keywords_is_seen_too(watch: Watch) -> None:
    client = Client()
    watch.answered(client, (), {"method": "GET", "path": TASKS}, response())
    assert TASKS in watch.of(client).bodies


def test_the_newest_answer_counts(watch: Watch) -> None:
    client = Client()
    saw(watch, client, HEALTHCHECK, 1)
    saw(watch, client, HEALTHCHECK, 2)
    assert watch.of(client).document(HEALTHCHECK, watch.clock()) == 2


@pytest.mark.parametrize(
    "newer", [response(status=500), response(status=404), response("text"), object()]
)
def test_an_answer_that_is_no_document_replaces_the_one_before(watch: Watch, newer: Any) -> None:
    client = Client()
    saw(watch, client, COMPONENTS, {})
    watch.answered(client, ("GET", COMPONENTS), {}, newer)
    unusable = watch.of(client).document(COMPONENTS, watch.clock())
    assert unusable == Unusable("/api/components was not seen in this check")


def test_a_document_too_old_is_not_used(watch: Watch, clock: Clock) -> None:
    client = Client()
    saw(watch, client, HEALTHCHECK, {})
    sightings = watch.of(client)
    assert sightings.document(HEALTHCHECK, clock.now + MAX_AGE) == {}
    late = sightings.document(HEALTHCHECK, clock.now + MAX_AGE + 1)
    assert late == Unusable("/api/healthcheck was seen 61 s ago")


def test_a_document_from_the_future_is_not_used(watch: Watch, clock: Clock) -> None:
    client = Client()
    saw(watch, client, HEALTHCHECK, {})
    assert isinstance(watch.of(client).document(HEALTHCHECK, clock.now - 1), Unusable)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "did not answer JSON"),
        (b"{", "did not answer JSON"),
        (b"\xff", "did not answer JSON"),
        (b"[" * 100_000, "did not answer JSON"),
        (b"9" * 10_000, "did not answer JSON"),  # Python refuses to read such a number
        (b" " * (MAX_BODY + 1), f"answered {MAX_BODY + 1} bytes"),
    ],
    ids=["empty", "cut", "not text", "nested without end", "a huge number", "a huge body"],
)
def test_a_hostile_body_is_unusable(watch: Watch, content: bytes, why: str) -> None:
    client = Client()
    watch.answered(client, ("GET", TASKS), {}, response(content))
    assert watch.of(client).document(TASKS, watch.clock()) == Unusable(f"/api/tasks {why}")


def test_clients_do_not_see_each_others_documents(watch: Watch) -> None:
    one, other = Client(), Client()
    saw(watch, one, HEALTHCHECK, {})
    assert watch.of(other).bodies == {}


def test_a_copied_client_has_seen_nothing(watch: Watch) -> None:
    client = Client()
    saw(watch, client, HEALTHCHECK, {})
    assert watch.of(copy.copy(client)).bodies == {}


def test_what_a_client_saw_goes_with_it(watch: Watch) -> None:
    client = Client()
    saw(watch, client, HEALTHCHECK, {})
    sightings = weakref.ref(watch.of(client).bodies[HEALTHCHECK])
    del client
    gc.collect()
    assert sightings() is None
    assert len(watch._by_client) == 0


def test_entering_an_install_names_the_instance_and_forgets_what_came_before_it(
    watch: Watch,
) -> None:
    client = Client()
    for path in (HEALTHCHECK, COMPONENTS, TASKS):
        saw(watch, client, path, {})
    watch.entered((SimpleNamespace(id=7, name="box"), client), {})
    assert watch.of(client).instance == ("7", "box")
    # The healthcheck is asked for before; the other two belong to this call or to none.
    assert set(watch.of(client).bodies) == {HEALTHCHECK}


@pytest.mark.parametrize("name", ["instance", "instance_model"])
def test_entering_with_keywords_is_understood_too(watch: Watch, name: str) -> None:
    client = Client()
    watch.entered((), {name: SimpleNamespace(id=7, name="box"), "shim_client": client})
    assert watch.of(client).instance == ("7", "box")
