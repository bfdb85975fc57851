"""
What an operator can choose, read once from the server's environment at load.

A value we do not understand is never guessed: the extension stays inactive and says which variable
it was, because the guess could be `enforce` where the operator meant `observe`.
"""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import attrs

from dstack_shim_server.errors import InvalidSettings

PREFIX = "DSTACK_SHIM_RESTART_"

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


class Mode(str, Enum):
    """How far the extension goes: nothing, only words, or the decision itself."""

    OFF = "off"
    OBSERVE = "observe"
    ENFORCE = "enforce"


@attrs.frozen
class Settings:
    """The operator's choices; the defaults are what an empty environment means."""

    mode: Mode = Mode.ENFORCE
    # Patch a server whose code is not in the table of known releases too.
    allow_unknown: bool = False
    # Count `latest` and versions nobody can parse as new enough to keep state.
    trust_dev_builds: bool = False


def read_settings(environment: Mapping[str, str]) -> Settings:
    """
    Read the variables starting with `DSTACK_SHIM_RESTART_`; an empty value counts as unset.

    Raises InvalidSettings naming every variable that is wrong, also those we do not know: a typing
    error in `…_MODE` would otherwise silently mean the default, which is to enforce.
    """
    given = {
        name: value.strip().lower()
        for name, value in environment.items()
        if name.startswith(PREFIX) and value.strip()
    }
    problems = [
        f"{name} is not a variable of this extension (known: {', '.join(map(PREFIX.__add__, _READ))})"
        for name in sorted(given)
        if name.removeprefix(PREFIX) not in _READ
    ]
    values: dict[str, Any] = {}
    for name, (field, read, expected) in _READ.items():
        text = given.get(PREFIX + name)
        if text is None:
            continue
        try:
            values[field] = read(text)
        except ValueError:
            problems.append(f"{PREFIX}{name} must be {expected}, not {text[:40]!r}")
    if problems:
        raise InvalidSettings("; ".join(problems))
    return Settings(**values)


def _boolean(text: str) -> bool:
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(text)


def _allowed(text: str) -> bool:
    if text not in {"allow", "refuse"}:
        raise ValueError(text)
    return text == "allow"


_READ: Mapping[str, tuple[str, Callable[[str], object], str]] = {
    "MODE": ("mode", Mode, "off, observe or enforce"),
    "UNKNOWN": ("allow_unknown", _allowed, "allow or refuse"),
    "TRUST_DEV_BUILDS": ("trust_dev_builds", _boolean, "true or false (also 1/0, yes/no, on/off)"),
}
