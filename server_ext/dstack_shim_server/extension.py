"""The extension put together: what the patched functions reach, whole or without the record."""

import json
from collections.abc import Mapping
from typing import Any

import attrs

from dstack_shim_server.amending import Amender
from dstack_shim_server.decisions import Decider
from dstack_shim_server.journal import Journal
from dstack_shim_server.observation import LONGEST
from dstack_shim_server.offers import Offers
from dstack_shim_server.record.recorder import Recorder
from dstack_shim_server.rollout import Rollout
from dstack_shim_server.settings import Settings
from dstack_shim_server.sightings import TASKS, Watch, method_and_path

REMOVED = "removed by dstack"


@attrs.frozen
class Extension:
    """All parts; `rollout` and `recorder` are None where no record is kept."""

    watch: Watch
    decider: Decider
    amender: Amender
    offers: Offers
    rollout: Rollout | None = None
    recorder: Recorder | None = None

    def permits(self, client: object, answer: object) -> object:
        """Return dstack's answer to `is_safe_to_restart`, or False if the roll-out says no."""
        return answer if self.rollout is None else self.rollout.permits(client, answer)

    def answered(
        self,
        client: object,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        response: object,
    ) -> None:
        """Take note of a finished request."""
        self.watch.answered(client, args, kwargs, response)
        _, path = method_and_path(args, kwargs)
        if self.recorder is None or not path.startswith(f"{TASKS}/"):
            return
        if getattr(response, "status_code", None) == 200:
            _note_task(self.recorder, path.split("/")[3], path, getattr(response, "content", b""))

    def left(self) -> None:
        """Take note of the end of an instance check's last part."""
        sightings = self.watch.left()
        if self.rollout is not None and sightings is not None:
            self.rollout.left(sightings)


def put_together(settings: Settings, status_type: Any, database_url: str) -> Extension:
    """Make the parts; the record is opened, not started."""
    watch, journal = Watch(), Journal()
    decider = Decider(settings=settings, watch=watch, journal=journal, status_type=status_type)
    recorder = Recorder(database_url, settings) if settings.record else None
    return Extension(
        watch=watch,
        decider=decider,
        amender=Amender(settings, watch, journal),
        offers=Offers(watch, recorder),
        rollout=None if recorder is None else Rollout(decider, recorder),
        recorder=recorder,
    )


def _note_task(recorder: Recorder, task_id: str, path: str, content: bytes) -> None:
    """Keep why a task ended, when its shim tells somebody, and that dstack removed it."""
    if path.endswith("/remove"):
        recorder.notes.told(task_id, REMOVED)
        return
    # Nearly all answers are about tasks that have not ended.
    if b'"terminated"' not in content:
        return
    told = json.loads(content)
    reason = told.get("termination_reason") if isinstance(told, dict) else None
    if isinstance(reason, str) and reason:
        recorder.notes.told(task_id, reason[:LONGEST])
