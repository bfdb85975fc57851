"""What the doctor says of one thing, and what may be done about it."""

from __future__ import annotations

from enum import Enum

import attrs

from dstack_shim.doctor import Finding, Level


class Cure(str, Enum):
    """What ``--fix`` can do, each to things that are this shim's beyond doubt."""

    CLOSE = "take away what others may do with it"
    SWEEP = "remove what a crash left half made"
    STOP = "stop the container"
    UNMOUNT = "unmount the volume"
    FORGET_KEYS = "remove the lines that no task needs"


@attrs.frozen
class Fix:
    """One cure and what it is for: a path, a container's id, a volume's or a user's name."""

    cure: Cure
    target: str


@attrs.frozen
class Check:
    """One thing looked at. ``todo`` is what a person is to do, "" where nothing is."""

    level: Level
    what: str
    words: str
    todo: str = ""
    fix: Fix | None = None

    def document(self) -> dict[str, object]:
        """For programs."""
        return {
            "level": self.level.name.lower(),
            "what": self.what,
            "words": self.words,
            "todo": self.todo or None,
            "fix": None if self.fix is None else self.fix.cure.name.lower(),
        }


def ok(what: str, words: str) -> Check:
    """It is as it should be."""
    return Check(Level.OK, what, words)


def warning(what: str, words: str, todo: str, fix: Fix | None = None) -> Check:
    """Somebody should look; the shim serves all the same."""
    return Check(Level.WARNING, what, words, todo, fix)


def broken(what: str, words: str, todo: str, fix: Fix | None = None) -> Check:
    """It keeps the shim from serving, a task from running, or something from being freed."""
    return Check(Level.BROKEN, what, words, todo, fix)


def of_examination(finding: Finding) -> Check:
    """What looking as a start would has found, with what to do about it."""
    return Check(finding.level, finding.what, finding.words, _todo(finding))


_TODO = (
    ("home", "give --shim-home the directory that the daemon has"),
    ("engine", "start the Docker Engine: systemctl start docker; its log says why it is down"),
    ("tasks", "mend what the words name, and ask again"),
    ("boot", "mount /proc as it is on other hosts"),
    ("record in ", "the next start sets it aside and goes by the container; keep a copy"),
    ("record ", "see what it was; remove the file once nobody needs it"),
    ("GPU ", "terminate one of the two tasks, or see which of them runs on it"),
    ("upgrade", "see dstack-shim events; the old file serves on until another is installed"),
    ("container ", "it is left alone; if nobody needs it, docker rm -f it"),
    ("directory ", "it is left alone; if nobody needs it, remove it"),
    ("gpus.not_detected", "run the vendor's tool by hand: until it answers, jobs get no GPU"),
    ("store.flush_failed", "the disk reports errors: see dmesg, move the home to a sound one"),
)


def _todo(finding: Finding) -> str:
    if finding.level is Level.OK:
        return ""
    found = (todo for begin, todo in _TODO if finding.what.startswith(begin))
    return next(found, "see what the words name")
