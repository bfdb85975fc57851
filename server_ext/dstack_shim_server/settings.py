"""
What an operator can choose, read once from the server's environment at load.

A value we do not understand is never guessed: the extension stays inactive and says which variable
it was, because the guess could be `enforce` where the operator meant `observe`.
"""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import attrs

from dstack_shim_server import choice, hours
from dstack_shim_server.choice import Choice, Offer
from dstack_shim_server.errors import InvalidSettings
from dstack_shim_server.policy import Policy

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
    # Keep a record in the server's database; without it there is no roll-out policy.
    record: bool = True
    policy: Policy = attrs.Factory(Policy)
    choice: Choice = attrs.Factory(Choice)
    # Instances that may fail to come back, or be rolled back by their shim, before the version stops.
    failures: int = 2
    # Seconds in which a restarted shim must be back.
    return_within: float = 300.0
    # Days that finished restarts and instances not seen any more stay in the record.
    retention_days: int = 90


def read_settings(environment: Mapping[str, str]) -> Settings:
    """
    Read the variables starting with `DSTACK_SHIM_RESTART_`; an empty value counts as unset.

    Raises InvalidSettings naming every variable that is wrong, also those we do not know: a typing
    error in `…_MODE` would otherwise silently mean the default, which is to enforce.
    """
    given = {
        name.removeprefix(PREFIX): value.strip()
        for name, value in environment.items()
        if name.startswith(PREFIX) and value.strip()
    }
    known = ", ".join(map(PREFIX.__add__, _READ))
    problems = [
        f"{PREFIX}{name} is not a variable of this extension (known: {known})"
        for name in sorted(given)
        if name not in _READ
    ]
    values: dict[str, Any] = {}
    for name, (read, expected) in _READ.items():
        if name not in given:
            continue
        try:
            values[name] = read(given[name])
        except (ValueError, RecursionError):
            problems.append(f"{PREFIX}{name} must be {expected}, not {given[name][:40]!r}")
    problems += [] if problems else _contradictions(values)
    if problems:
        raise InvalidSettings("; ".join(problems))
    return _settings(values)


def _contradictions(values: Mapping[str, Any]) -> list[str]:
    problems = []
    if not values.get("RECORD", True):
        needing = sorted(values.keys() & _NEED_RECORD)
        problems += [f"{PREFIX}{name} needs the record, which is off" for name in needing]
    if "SHA256" in values and "DOWNLOAD_URL" not in values:
        problems.append(f"{PREFIX}SHA256 needs {PREFIX}DOWNLOAD_URL")
    if "HOURS_ZONE" in values and "HOURS" not in values:
        problems.append(f"{PREFIX}HOURS_ZONE needs {PREFIX}HOURS")
    return problems


def _settings(values: Mapping[str, Any]) -> Settings:
    allowed = values.get("HOURS")
    if allowed is not None and "HOURS_ZONE" in values:
        allowed = attrs.evolve(allowed, zone=values["HOURS_ZONE"])
    policy = Policy(
        canaries=values.get("CANARIES", Policy().canaries),
        max_under_way=values.get("MAX_UNDER_WAY", 0),
        paused=values.get("PAUSE", False),
        hours=allowed,
        hold_instances=values.get("HOLD_INSTANCES", frozenset()),
        hold_fleets=values.get("HOLD_FLEETS", frozenset()),
    )
    everywhere = Offer(
        version=values.get("VERSION", ""),
        url=values.get("DOWNLOAD_URL", ""),
        sha256=values.get("SHA256", {}),
    )
    default = Settings()
    return Settings(
        mode=values.get("MODE", default.mode),
        allow_unknown=values.get("UNKNOWN", False),
        trust_dev_builds=values.get("TRUST_DEV_BUILDS", False),
        record=values.get("RECORD", True),
        policy=policy,
        choice=Choice(
            everywhere=everywhere,
            fleets=values.get("FLEETS", {}),
            allow_downgrade=values.get("ALLOW_DOWNGRADE", False),
        ),
        failures=values.get("FAILURES", default.failures),
        return_within=float(values.get("RETURN_WITHIN", default.return_within)),
        retention_days=values.get("RETENTION_DAYS", default.retention_days),
    )


def _boolean(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(text)


def _allowed(text: str) -> bool:
    if text.lower() not in {"allow", "refuse"}:
        raise ValueError(text)
    return text.lower() == "allow"


def _integer(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isascii() or not text.isdigit() or len(text) > 9:
            raise ValueError(text)
        if not least <= int(text) <= most:
            raise ValueError(text)
        return int(text)

    return read


def _names(text: str) -> frozenset[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names) or any(name.split() != [name] for name in names):
        raise ValueError(text)
    return frozenset(names)


_YES_NO = "true or false (also 1/0, yes/no, on/off)"
_NAMES = "names separated by commas"
_READ: Mapping[str, tuple[Callable[[str], object], str]] = {
    "MODE": (lambda text: Mode(text.lower()), "off, observe or enforce"),
    "UNKNOWN": (_allowed, "allow or refuse"),
    "TRUST_DEV_BUILDS": (_boolean, _YES_NO),
    "RECORD": (_boolean, _YES_NO),
    "CANARIES": (_integer(0, 100_000), "a number from 0 to 100000"),
    "MAX_UNDER_WAY": (_integer(0, 100_000), "a number from 0 (no limit) to 100000"),
    "PAUSE": (_boolean, _YES_NO),
    "HOURS": (hours.read_hours, hours.EXPECTED),
    "HOURS_ZONE": (hours.read_zone, "the name of a time zone, like Europe/Berlin"),
    "HOLD_INSTANCES": (_names, _NAMES),
    "HOLD_FLEETS": (_names, f"{_NAMES}, each NAME or PROJECT/NAME"),
    "FAILURES": (_integer(1, 100_000), "a number from 1 to 100000"),
    "RETURN_WITHIN": (_integer(10, 86_400), "a number of seconds from 10 to 86400"),
    "RETENTION_DAYS": (_integer(1, 3_650), "a number of days from 1 to 3650"),
    "VERSION": (choice.read_version, "a version like 0.22.5 or 0.22.5.post1"),
    "DOWNLOAD_URL": (
        choice.read_url,
        "an http or https URL without a password, places {version} and {arch}",
    ),
    "SHA256": (choice.read_sha256, "64 hexadecimal digits, or amd64=…,arm64=…"),
    "FLEETS": (
        choice.read_fleets,
        'a JSON object like {"FLEET": {"version": …, "url": …, "sha256": …}}',
    ),
    "ALLOW_DOWNGRADE": (_boolean, _YES_NO),
}
_NEED_RECORD = _READ.keys() - {"MODE", "UNKNOWN", "TRUST_DEV_BUILDS", "RECORD"}
