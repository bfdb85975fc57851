"""From environment and server to the line that says: active and how, or inactive and why."""

import importlib
from atexit import register as at_exit
from collections.abc import Mapping

import attrs

from dstack_shim_server import extension, metrics, patches, shapes
from dstack_shim_server.errors import InvalidSettings, NotPatchable, ShimRestartError
from dstack_shim_server.extension import Extension
from dstack_shim_server.guard import logger, shielded
from dstack_shim_server.patches import Patches
from dstack_shim_server.record.database import database_url
from dstack_shim_server.settings import PREFIX, Mode, Settings, read_settings
from dstack_shim_server.shapes import ImportModule, Server


@attrs.frozen
class Outcome:
    """What a load came to. `patches` are those of this load: none if inactive or already active."""

    active: bool
    summary: str
    patches: Patches = attrs.Factory(Patches)


def load(
    environment: Mapping[str, str], import_module: ImportModule = importlib.import_module
) -> Outcome:
    """
    Make the extension active if settings and server allow it, and log the outcome in one line.

    Reasons to stay inactive are no errors and do not raise; anything else that does is a fault of
    ours and is the caller's to stop.
    """
    try:
        outcome = _activate(read_settings(environment), environment, import_module)
    except ShimRestartError as exception:
        outcome = Outcome(active=False, summary=f"inactive: {exception}")
        logger.warning("shim_restart: %s", outcome.summary)
    else:
        logger.info("shim_restart: %s", outcome.summary)
    return outcome


def _activate(
    settings: Settings, environment: Mapping[str, str], import_module: ImportModule
) -> Outcome:
    if settings.mode is Mode.OFF:
        return Outcome(active=False, summary=f"inactive: {PREFIX}MODE=off")
    release = _release(import_module)
    try:
        server = shapes.look_at_server(import_module)
        if patches.in_place(server):
            return Outcome(active=True, summary="active already, this load changes nothing")
        known = _known_as(server, settings)
    except NotPatchable as exception:
        raise NotPatchable(f"dstack {release}: {exception}") from exception
    _require_answers(server, settings)
    made = extension.put_together(
        settings,
        status_type=import_module(shapes.CLIENT_MODULE).TaskStatus,
        database_url=database_url(environment),
    )
    outcome = Outcome(
        active=True, summary=_summary(settings, release, known, server), patches=Patches()
    )
    outcome.patches.install(server, made)
    # Last: a fault of ours before this line leaves dstack alone, and none after it is seen.
    shielded("starting the record", lambda: _start_record(made), lambda: None)
    shielded("offering metrics", lambda: _offer_metrics(made, import_module), lambda: None)
    return outcome


def _start_record(made: Extension) -> None:
    if made.recorder is not None:
        made.recorder.start()
        at_exit(made.recorder.stop, timeout=2.0)


def _offer_metrics(made: Extension, import_module: ImportModule) -> None:
    if made.recorder is not None:
        client = import_module("prometheus_client")
        metrics.register(client, made.recorder, made.decider.tally)


def _summary(settings: Settings, release: str, known: str, server: Server) -> str:
    names = ", ".join(dict.fromkeys(name.rpartition(":")[2] for name in server.places))
    trust = ", trusting dev builds" if settings.trust_dev_builds else ""
    record = "" if settings.record else ", without a record"
    return (
        f"active: mode {settings.mode.value}{trust}{record}, dstack {release} ({known}), "
        f"patched {names}"
    )


def _require_answers(server: Server, settings: Settings) -> None:
    """Check that the operator's choice of a shim can be made to count here."""
    missing = {shapes.WANTED_VERSION, shapes.DOWNLOAD_URL} - {
        place.attribute for place in server.answers.values()
    }
    if settings.choice and missing:
        raise InvalidSettings(
            f"this server cannot be told which shim to install ({', '.join(sorted(missing))} is "
            f"missing), so {PREFIX}VERSION, {PREFIX}DOWNLOAD_URL and {PREFIX}FLEETS must be empty"
        )


def _known_as(server: Server, settings: Settings) -> str:
    """Say as what the server's code is known; raise NotPatchable if it must be left alone."""
    if server.shape is not None:
        return f"decision code of {server.shape}"
    if not settings.allow_unknown:
        raise NotPatchable(
            f"its decision code is not one of a known release; {PREFIX}UNKNOWN=allow tries it all the same"
        )
    shapes.require_workable(server)
    return "unknown decision code, allowed"


def _release(import_module: ImportModule) -> str:
    """Return dstack's version for the log line; the decision never depends on it."""
    try:
        return str(import_module("dstack.version").__version__)
    except (ImportError, AttributeError):
        return "(unknown version)"
