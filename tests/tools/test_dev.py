"""What ./dev says and refuses before it changes anything."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOBODY = 65534
# What the script itself is made of; everything it looks for is missing then.
PLAIN = ("id", "mkdir", "sh", "true", "unshare", "ldd", "grep")

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def checkout() -> Iterator[Path]:
    """The two scripts alone, in a place with a space that any user can reach."""
    with tempfile.TemporaryDirectory(prefix="a check out ") as name:
        place = Path(name)
        place.chmod(0o755)
        (place / "tools").mkdir()
        shutil.copy(ROOT / "dev", place)
        shutil.copy(ROOT / "tools" / "system-packages", place / "tools")
        yield place


def call(*command: str | Path, cwd: Path, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload,no-any-return] # `more` is run's own
        command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False, **more
    )


@pytest.mark.parametrize("word", [[], ["help"], ["--help"]])
def test_help_needs_nothing_and_works_from_anywhere(checkout: Path, word: list[str]) -> None:
    answer = call(checkout / "dev", *word, cwd=Path("/"))
    assert answer.returncode == 0
    assert "./dev COMMAND" in answer.stdout
    assert not (checkout / ".venv").exists()


@as_root
@pytest.mark.parametrize("command", ["test", "demo", "prove", "engine"])
def test_without_root_it_says_what_it_needs_and_changes_nothing(
    checkout: Path, command: str
) -> None:
    os.chown(checkout, NOBODY, NOBODY)
    answer = call(checkout / "dev", command, cwd=checkout, user=NOBODY, group=NOBODY)
    assert answer.returncode == 1
    assert "needs root" in answer.stderr
    assert not (checkout / ".venv").exists()


@as_root
def test_without_apt_it_names_the_packages_it_misses(checkout: Path, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in PLAIN:
        found = shutil.which(name)
        assert found
        (programs / name).symlink_to(found)
    script = checkout / "tools" / "system-packages"
    answer = call("/bin/sh", script, "engine", cwd=checkout, env={"PATH": str(programs)})
    assert answer.returncode == 1
    assert "docker.io" in answer.stderr
    assert "busybox-static" in answer.stderr
    assert "has no apt-get" in answer.stderr


@as_root
@pytest.mark.skipif(not shutil.which("busybox"), reason="this machine has no busybox")
def test_a_docker_package_without_a_daemon_is_not_added_to(checkout: Path, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in (*PLAIN, "sed", "sort"):
        (programs / name).symlink_to(shutil.which(name) or "")
    for name in ("ip", "iptables", "mkfs.ext4", "strace", "curl", "sshd", "docker-registry"):
        (programs / name).symlink_to("/bin/true")
    for name in ("nginx", "htpasswd"):
        (programs / name).symlink_to("/bin/true")
    (programs / "busybox").symlink_to(shutil.which("busybox") or "")
    query = programs / "dpkg-query"
    query.write_text("#!/bin/sh\necho installed docker-ce-cli\n")
    query.chmod(0o755)
    script = checkout / "tools" / "system-packages"
    answer = call("/bin/sh", script, "engine", cwd=checkout, env={"PATH": str(programs)})
    assert answer.returncode == 1
    assert "without dockerd" in answer.stderr
