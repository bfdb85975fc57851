"""The root of a file system of our making is opened to everybody, once, also after a crash."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from dstack_shim.errors import ResourceError
from dstack_shim.resources.volumes import note_formatting, open_new_root


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def new_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What ``mkfs.ext4`` leaves as the root of a file system, on any file system and as anybody."""
    root = tmp_path / "data"
    (root / "lost+found").mkdir(parents=True)
    root.chmod(0o755)
    really = Path.stat

    class AsRoot:
        def __init__(self, of: object) -> None:
            self._of = of
            self.st_uid = 0

        def __getattr__(self, name: str) -> object:
            return getattr(self._of, name)

    monkeypatch.setattr(Path, "stat", lambda path, **options: AsRoot(really(path, **options)))
    return root


def test_the_root_of_a_file_system_we_made_is_opened_to_everybody(new_root: Path) -> None:
    parent = str(new_root.parent)
    note_formatting(parent, "data", "gcp 1")
    assert mode(new_root.parent / ".data.formatting") == 0o600
    open_new_root(parent, "data", "gcp 1")
    assert mode(new_root) == 0o777
    assert not (new_root.parent / ".data.formatting").exists()


def test_a_root_that_somebody_else_made_is_left_alone(new_root: Path) -> None:
    open_new_root(str(new_root.parent), "data", "gcp 1")
    assert mode(new_root) == 0o755


def test_a_root_is_left_alone_once_somebody_has_used_the_volume(new_root: Path) -> None:
    note_formatting(str(new_root.parent), "data", "gcp 1")
    (new_root / "file").touch()
    open_new_root(str(new_root.parent), "data", "gcp 1")
    assert mode(new_root) == 0o755
    note_formatting(str(new_root.parent), "data", "gcp 1")
    (new_root / "file").unlink()
    new_root.chmod(0o700)
    open_new_root(str(new_root.parent), "data", "gcp 1")
    assert mode(new_root) == 0o700


def test_a_note_about_an_earlier_volume_of_that_name_counts_for_nothing(new_root: Path) -> None:
    note_formatting(str(new_root.parent), "data", "gcp 1")
    note_formatting(str(new_root.parent), "data", "gcp 2")
    open_new_root(str(new_root.parent), "data", "gcp 1")
    assert mode(new_root) == 0o755
    assert not (new_root.parent / ".data.formatting").exists()


def test_a_root_that_cannot_be_opened_is_an_error(
    new_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    note_formatting(str(new_root.parent), "data", "gcp 1")
    monkeypatch.setattr(Path, "chmod", fail)
    with pytest.raises(ResourceError, match=r"volume data: .*Operation not permitted"):
        open_new_root(str(new_root.parent), "data", "gcp 1")
