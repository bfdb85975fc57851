from __future__ import annotations

import json

import pytest

from dstack_shim_server import choice
from dstack_shim_server.choice import Choice, Offer, read_document

SHA = "0123456789abcdef" * 4
HERE = Offer(version="0.22.5", url="https://x.example/{version}-{arch}", sha256={"": SHA})


def test_a_fleet_has_its_own_offer_by_name_or_with_its_project() -> None:
    chosen = Choice(HERE, {"gpu": Offer(version="1.0"), "main/cpu": Offer(version="2.0")})
    assert chosen.offer("main", "gpu").version == "1.0"
    assert chosen.offer("main", "cpu").version == "2.0"
    assert chosen.offer("other", "cpu") == HERE
    assert chosen.offer("", "") == HERE


def test_the_one_with_the_project_counts_first() -> None:
    chosen = Choice(HERE, {"gpu": Offer(version="1.0"), "main/gpu": Offer(version="2.0")})
    assert chosen.offer("main", "gpu").version == "2.0"


def test_what_is_offered_and_nothing_are_told_apart() -> None:
    assert not Choice()
    assert not Choice(allow_downgrade=True)
    assert Choice(HERE)
    assert Choice(fleets={"a": HERE})


def test_written_and_read_back_it_is_the_same() -> None:
    chosen = Choice(HERE, {"gpu": HERE}, allow_downgrade=True)
    assert read_document(chosen.document()) == chosen
    assert read_document(Choice().document()) == Choice()


def test_the_address_is_filled_in() -> None:
    assert HERE.address("0.22.5", "arm64") == "https://x.example/0.22.5-arm64"
    assert HERE.digest_for("arm64") == SHA
    assert Offer(sha256={"amd64": SHA}).digest_for("arm64") == ""


@pytest.mark.parametrize(
    ("installed", "offered", "down"),
    [
        ("0.22.5", "0.22.4", True),
        ("0.22.4", "0.22.5", False),
        ("0.22.5", "0.22.5", False),
        ("0.22.5.post1", "0.22.5", True),
        ("latest", "0.22.5", False),
        ("", "0.22.5", False),
    ],
)
def test_downgrades_are_told(installed: str, offered: str, *, down: bool) -> None:
    assert choice.is_downgrade(installed, offered) is down


@pytest.mark.parametrize("text", ["latest", "1", "", "0.22.5 ", "v", "x" * 500])
def test_versions_that_cannot_be_compared_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        choice.read_version(text)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "https://me:secret@x/{version}",
            "ftp://x/{version}",
            "x",
            "https://x/{",
            "https://x/{0}",
            "https://x/{}",
        ),
        *("https://x/{version.real}", "https://x/{version!r}", "https://x/{arch:>9}"),
        *("https://x/{name}", "https://x/}"),
    ],
)
def test_templates_with_other_places_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        choice.read_url(text)


def test_braces_that_are_meant_pass() -> None:
    assert choice.read_url("https://x/{{a}}/{version}")


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (SHA.upper(), {"": SHA}),
        (f"amd64={SHA}, arm64={SHA}", {"amd64": SHA, "arm64": SHA}),
    ],
)
def test_digests_are_read(text: str, read: dict[str, str]) -> None:
    assert choice.read_sha256(text) == read


@pytest.mark.parametrize("text", ["", "x", SHA[1:], f"mips={SHA}", f"amd64={SHA},", f"={SHA}x"])
def test_digests_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        choice.read_sha256(text)


@pytest.mark.parametrize(
    "document",
    [
        *([], "x", 7, None, {"a": None}, {"a": []}, {"a": {"version": ""}}),
        *({"a": {"version": 7}}, {"a": {"image": "x"}}, {"a": {"version": "latest"}}),
        {"a": {"url": "file:///x"}},
    ],
)
def test_fleets_not_understood_are_refused(document: object) -> None:
    with pytest.raises(ValueError, match=r".*"):
        choice.read_fleets(json.dumps(document))
