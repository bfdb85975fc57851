"""
One instance check as the roll-out sees it: may the shim be restarted as far as the others are
concerned, and what goes into the record.

Nothing here asks the shim for anything. Only a claim asks the database for anything, between two
requests and for a few seconds at most.
"""

import uuid
from collections.abc import Callable
from datetime import datetime, timezone

import attrs

from dstack_shim_server import decisions, observation
from dstack_shim_server.decisions import Decider
from dstack_shim_server.observation import Observation
from dstack_shim_server.policy import RolloutState, rule
from dstack_shim_server.proof import TaskBefore
from dstack_shim_server.record.claiming import request_for
from dstack_shim_server.record.recorder import Recorder
from dstack_shim_server.record.rows import Fleet, NewRestart
from dstack_shim_server.settings import Mode
from dstack_shim_server.sightings import COMPONENTS, HEALTHCHECK, Sightings


@attrs.frozen
class Rollout:
    """Joins the decision about one instance with those about all; shared by all threads."""

    decider: Decider
    recorder: Recorder

    def permits(self, client: object, answer: object) -> object:
        """Return dstack's answer to `is_safe_to_restart`, or False if others come first."""
        sightings = self.decider.watch.of(client)
        # Not asked by an instance check: nothing would be restarted.
        if not answer or sightings is not self.decider.watch.current():
            return answer
        if self.decider.settings.mode is not Mode.ENFORCE:
            return answer
        # As it will be if nothing is in the way: a claim writes it down.
        sightings.answer, sightings.sentence = True, "restart requested"
        sightings.held = self._refusal(sightings, client)
        return answer if not sightings.held else False

    def left(self, sightings: Sightings) -> None:
        """Record a check whose install function was left."""
        done = sightings.shutdown_status == 200
        # Asked for and not answered: it may be under way all the same, so the claim stays, and the
        # next checks tell.
        unanswered = sightings.shutdown_asked and not sightings.shutdown_status
        if sightings.claim and not done and not unanswered:
            self.recorder.withdraw(sightings.claim)
        seen = self._observed(sightings)
        if not sightings.claim and done:
            self.recorder.notes.restarted(_new_restart(seen, self.recorder.notes.reason_of))
        # A claim has written what this check saw.
        if not (sightings.claim and done):
            self.recorder.see(seen)

    def _refusal(self, sightings: Sightings, client: object) -> str:
        """Claim the restart; if that is not to be, return why."""
        seen = self._observed(sightings)
        new = _new_restart(seen, self.recorder.notes.reason_of)
        trouble = self.recorder.trouble
        state = RolloutState() if trouble else self.recorder.snapshot.state
        fleet = self.recorder.fleet(seen.subject.fleet_id)
        if fleet is None and not trouble and self.decider.settings.policy.hold_fleets:
            return "the name of its fleet is not known yet"
        now = datetime.now(timezone.utc)
        # First by what is known: most of those that have to wait need no transaction to learn it.
        ruling = rule(self.decider.settings.policy, state, request_for(new, fleet or Fleet()), now)
        if not ruling.allowed:
            return ruling.reason
        try:
            ruling = self.recorder.claim(new, seen)
        except Exception as exception:  # noqa: BLE001  a database may fail in any way
            # Without the record nobody knows what else is restarted; what has no task cannot lose one.
            if self.decider.is_idle(client):
                return ""
            return f"the record cannot be used: {trouble or type(exception).__name__}"
        if ruling.allowed:
            sightings.claim = new.id
            return ""
        return ruling.reason

    def _observed(self, sightings: Sightings) -> Observation:
        now = self.decider.watch.clock()
        decision = sightings.decision
        subject = sightings.subject
        assert subject is not None
        return observation.observe(
            subject,
            self.recorder.clock(),
            sightings.document(HEALTHCHECK, now),
            decisions.shim_component(sightings.document(COMPONENTS, now)),
            sightings.newest_tasks(now),
            wanted_version=sightings.wanted,
            answer=sightings.answer,
            held=bool(sightings.held),
            reason=sightings.sentence,
            blocking=observation.count_by_status(
                task.status.value for task in (decision.blocking if decision else ())
            ),
        )


def _new_restart(seen: Observation, reason_of: Callable[[str], str]) -> NewRestart:
    return NewRestart(
        id=str(uuid.uuid4()),
        subject=seen.subject,
        from_version=seen.running_version,
        to_version=seen.installed_version,
        process=seen.process,
        tasks=tuple(TaskBefore(*task, reason_of(task[0])) for task in seen.tasks or ()),
    )
