from __future__ import annotations

from typing import Any

import pytest

from dstack_shim_server import activation, patches, shapes
from dstack_shim_server.patches import Patches
from tests.server_ext.servers import ALLOW, Server, answers, fresh

pytestmark = pytest.mark.usefixtures("all_levels")

MODE = "DSTACK_SHIM_RESTART_MODE"


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in server's code is in the table, as that of releases 9.9.8 and 9.9.9."""
    places = shapes.look_at_server(Server().import_module).places
    functions = {name: place.digest for name, place in places.items()}
    table = (shapes.Shape(("9.9.8", "9.9.9"), functions),)
    monkeypatch.setattr(shapes, "known_shapes", lambda: table)


def load(server: Server, **environment: str) -> activation.Outcome:
    return activation.load(environment, server.import_module)


@pytest.mark.usefixtures("known")
def test_a_known_server_is_patched_and_the_line_says_how(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outcome = load(Server(), DSTACK_SHIM_RESTART_RECORD="off")
    assert outcome.active
    assert caplog.messages == [
        (
            "shim_restart: active: mode enforce, without a record, dstack 9.9.9 (decision code of 9.9.8 to 9.9.9), "
            "patched ShimClient._request, ShimClient._get_restart_safe_task_statuses, "
            "ShimClient.is_safe_to_restart, ShimClient.shutdown, _maybe_install_components"
        )
    ]
    assert caplog.records[0].levelname == "INFO"


@pytest.mark.usefixtures("known")
def test_the_line_says_if_dev_builds_are_trusted() -> None:
    outcome = load(Server(), DSTACK_SHIM_RESTART_TRUST_DEV_BUILDS="1")
    assert "mode enforce, trusting dev builds, dstack" in outcome.summary


def test_an_unknown_server_is_left_alone_and_the_line_says_how_to_try(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server()
    before = server.functions()
    outcome = load(server)
    assert not outcome.active
    assert server.functions() == before
    assert "dstack 9.9.9: its decision code is not one of a known release" in outcome.summary
    assert "DSTACK_SHIM_RESTART_UNKNOWN=allow" in outcome.summary
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_an_unknown_server_is_patched_if_allowed() -> None:
    outcome = load(Server(), **ALLOW)
    assert outcome.active
    assert "(unknown decision code, allowed)" in outcome.summary


def test_an_unknown_server_that_would_not_ask_is_left_alone_even_if_allowed() -> None:
    server = Server()
    server.client.ShimClient.is_safe_to_restart = lambda self: True
    before = server.functions()
    outcome = load(server, **ALLOW)
    assert not outcome.active
    assert server.functions() == before


@pytest.mark.parametrize("allowed", [{}, ALLOW], ids=["refused", "allowed"])
def test_a_server_without_a_decision_is_left_alone(allowed: dict[str, str]) -> None:
    server = Server()
    del server.client.ShimClient.is_safe_to_restart
    outcome = load(server, **allowed)
    assert not outcome.active
    assert outcome.summary.startswith("inactive: dstack 9.9.9: it has no restart decision")


def test_a_server_of_unreadable_version_is_still_judged_by_its_code() -> None:
    server = Server()
    del server.modules["dstack.version"]
    assert "dstack (unknown version)" in load(server, **ALLOW).summary


def test_off_patches_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    before = server.functions()
    assert not load(server, **{**ALLOW, MODE: "off"}).active
    assert server.functions() == before
    assert caplog.messages == ["shim_restart: inactive: DSTACK_SHIM_RESTART_MODE=off"]


def test_bad_settings_patch_nothing_and_are_named(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    before = server.functions()
    assert not load(server, **{**ALLOW, MODE: "maybe"}).active
    assert server.functions() == before
    assert caplog.messages == [
        (
            "shim_restart: inactive: DSTACK_SHIM_RESTART_MODE must be off, observe or enforce, "
            "not 'maybe'"
        )
    ]


def test_a_second_load_changes_nothing() -> None:
    server = Server()
    load(server, **ALLOW)
    after_first = server.functions()
    outcome = load(server, **ALLOW)
    assert outcome.active
    assert "active already" in outcome.summary
    assert server.functions() == after_first
    outcome.patches.take_out()  # not those of the first load
    assert server.functions() == after_first


def test_every_copy_of_the_instance_check_is_patched() -> None:
    server = Server()
    copy = server.modules[shapes.CHECK_MODULES[1]] = fresh("check")
    original = copy._maybe_install_components
    load(server, **ALLOW)
    assert copy._maybe_install_components is not original


def test_taken_out_the_server_is_as_it_was() -> None:
    server = Server()
    before = server.functions()
    outcome = load(server, **ALLOW)
    outcome.patches.take_out()
    outcome.patches.take_out()
    assert server.functions() == before
    assert not server.restarts(answers("0.22.5", "0.22.5.post1", "running"))


def test_an_inherited_function_is_inherited_again_when_taken_out() -> None:
    server = Server()
    vars(server.client)["ShimClient"] = type("ShimClient", (server.client.ShimClient,), {})
    outcome = load(server, **ALLOW)
    assert "_request" in vars(server.client.ShimClient)
    outcome.patches.take_out()
    assert "_request" not in vars(server.client.ShimClient)


@pytest.mark.parametrize("fails_at", range(7))
def test_a_patch_that_fails_half_way_takes_the_others_out(
    fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server()
    before = server.functions()
    put = Patches.put
    done: list[Any] = []

    def fail_in_time(self: Patches, *arguments: Any) -> None:
        if len(done) == fails_at:
            raise RuntimeError("ours")
        done.append(arguments)
        put(self, *arguments)

    monkeypatch.setattr(Patches, "put", fail_in_time)
    with pytest.raises(RuntimeError):
        load(server, **ALLOW)
    assert server.functions() == before


def test_what_stands_in_looks_like_the_original() -> None:
    server = Server()
    before = server.functions()
    load(server, **ALLOW)
    for original, ours in zip(before, server.functions(), strict=True):
        assert ours.__wrapped__ is original
        assert ours.__name__ == original.__name__
        assert hasattr(ours, patches.MARK)
        assert not hasattr(original, patches.MARK)
