from __future__ import annotations

import pytest

from dstack_shim.engine.reference import parse_reference
from dstack_shim.errors import PullFailed

DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "name", "tag", "digest", "registry"),
    [
        ("a", "a", None, None, "docker.io"),
        ("a:1", "a", "1", None, "docker.io"),
        ("library/a", "library/a", None, None, "docker.io"),
        ("host:5000/a", "host:5000/a", None, None, "host:5000"),
        ("host:5000/a:1", "host:5000/a", "1", None, "host:5000"),
        (f"a@{DIGEST}", "a", None, DIGEST, "docker.io"),
        (f"a:1@{DIGEST}", "a", "1", DIGEST, "docker.io"),
        (f"host:5000/a:1@{DIGEST}", "host:5000/a", "1", DIGEST, "host:5000"),
        ("localhost/a", "localhost/a", None, None, "localhost"),
        ("localhost:5000/a/b/c:x", "localhost:5000/a/b/c", "x", None, "localhost:5000"),
        ("ghcr.io/o/i:v1.2-x_y", "ghcr.io/o/i", "v1.2-x_y", None, "ghcr.io"),
        ("docker.io/o/i", "docker.io/o/i", None, None, "docker.io"),
        ("UPPER/a", "UPPER/a", None, None, "UPPER"),
        ("[::1]:5000/a:1", "[::1]:5000/a", "1", None, "[::1]:5000"),
        ("a_b/c--d.e/f", "a_b/c--d.e/f", None, None, "docker.io"),
        ("a:latest", "a", "latest", None, "docker.io"),
        ("a:5000", "a", "5000", None, "docker.io"),
    ],
)
def test_a_colon_is_a_tag_only_after_the_last_slash_and_outside_a_digest(
    text: str, name: str, tag: str | None, digest: str | None, registry: str
) -> None:
    reference = parse_reference(text)
    assert (reference.name, reference.tag, reference.digest) == (name, tag, digest)
    assert reference.registry == registry


@pytest.mark.parametrize(
    ("text", "version", "moves"),
    [
        ("a", "latest", True),
        ("host:5000/a", "latest", True),
        ("a:latest", "latest", True),
        ("a:1", "1", False),
        (f"a@{DIGEST}", DIGEST, False),
        (f"a:latest@{DIGEST}", DIGEST, False),
    ],
)
def test_only_latest_moves(text: str, version: str, moves: bool) -> None:
    reference = parse_reference(text)
    assert (reference.version, reference.moves) == (version, moves)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "a b",
        "a:",
        "a@",
        ":1",
        "/a",
        "a/",
        "a//b",
        "../a",
        "a/../b",
        "./a",
        "Upper",
        "host/Upper",
        "a:1:2",
        "a@sha256:xyz",
        "a@sha256",
        "http://host/a",
        "a?b",
        "a#b",
        "a\n",
        "a\0",
        "ä",
        "a:" + "t" * 129,
        "a" * 5000,
        "$(id)",
    ],
)
def test_what_is_no_reference_is_refused_by_name(text: str) -> None:
    with pytest.raises(PullFailed, match=r"^image_name: .* is not an image reference"):
        parse_reference(text)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("a", "https://index.docker.io/v1/"),
        ("docker.io/o/i:1", "https://index.docker.io/v1/"),
        ("index.docker.io/o/i:1", "https://index.docker.io/v1/"),
        ("ghcr.io/o/i", "ghcr.io"),
        ("host:5000/a", "host:5000"),
    ],
)
def test_credentials_name_the_registry_they_are_for(text: str, address: str) -> None:
    assert parse_reference(text).login_address == address
