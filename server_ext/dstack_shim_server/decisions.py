"""
May this shim be restarted now, and in which words is that said.

The gate of the contracts says which task statuses survive a restart, given what runs and what is
installed; dstack's own code then compares them with the task list. `observe` computes the same and
lets dstack's answer stand.
"""

from collections.abc import Sequence
from typing import Any

import attrs
from dstack_shim_contracts.api import SHIM
from dstack_shim_contracts.gate import ALWAYS_SAFE, Decision, Verdict, decide, may_restart
from dstack_shim_contracts.statuses import TaskStatus

from dstack_shim_server.journal import Journal, Tally
from dstack_shim_server.settings import Mode, Settings
from dstack_shim_server.sightings import (
    COMPONENTS,
    HEALTHCHECK,
    TASKS,
    Sightings,
    Unusable,
    Watch,
)


@attrs.frozen
class Decider:
    """Answers the questions the patched functions ask; shared by all clients and threads."""

    settings: Settings
    watch: Watch
    journal: Journal
    # The server's own enum: its list of statuses keeps its element type.
    status_type: Any
    tally: Tally = attrs.Factory(Tally)

    def safe_statuses(self, client: object, stock: Sequence[Any]) -> Sequence[Any]:
        """Return the statuses that survive a restart: the gate's, or dstack's own in `observe`."""
        sightings = self.watch.of(client)
        sightings.verdict = verdict = judge(sightings, self.settings, self.watch.clock())
        if self.settings.mode is not Mode.ENFORCE:
            return stock
        return [
            self.status_type(status.value) for status in TaskStatus if status in verdict.statuses
        ]

    def is_idle(self, client: object) -> bool:
        """Say whether nothing of the tasks just listed is alive: no restart could hurt anyone."""
        listed = self.watch.of(client).document(TASKS, self.watch.clock())
        items = listed.get("tasks") if isinstance(listed, dict) else None
        return may_restart(Verdict(ALWAYS_SAFE, ""), items).restart

    def explain(self, client: object, answer: object) -> None:
        """Log why dstack got this answer to `is_safe_to_restart`, once per change and instance."""
        sightings = self.watch.of(client)
        sightings.answer = bool(answer)
        sightings.sentence = self._sentence(sightings, bool(answer))
        self.tally.add("restart" if answer else "wait for others" if sightings.held else "wait")
        # Each decision asks the gate anew: this verdict must not explain the next one.
        sightings.verdict = None
        self.journal.note(sightings.instance, sightings.sentence)

    def _sentence(self, sightings: Sightings, answer: bool) -> str:
        word = "safe" if answer else "not safe"
        if sightings.verdict is None:
            return f"{word}: dstack's own rule for shims this old, the gate was not asked"
        sightings.decision = decision = self._decision(sightings, sightings.verdict)
        if sightings.held:
            return f"not now: {sightings.held}"
        if self.settings.mode is Mode.ENFORCE and decision.restart == answer:
            return decision.reason
        return f"{word} by dstack's own rule; by the gate {decision.reason}"

    def _decision(self, sightings: Sightings, verdict: Verdict) -> Decision:
        listed = sightings.document(TASKS, self.watch.clock())
        return may_restart(verdict, listed.get("tasks") if isinstance(listed, dict) else None)


def judge(sightings: Sightings, settings: Settings, now: float) -> Verdict:
    """Ask the gate about what was seen; whatever was not seen makes only `terminated` safe."""
    healthcheck = sightings.document(HEALTHCHECK, now)
    component = shim_component(sightings.document(COMPONENTS, now))
    for document in (healthcheck, component):
        if isinstance(document, Unusable):
            return Verdict(ALWAYS_SAFE, f"not safe: {document.why}")
    return decide(healthcheck, component, trust_dev_builds=settings.trust_dev_builds)


def shim_component(document: object) -> object:
    """Return the shim's entry of a components document, None if there is none, or an Unusable."""
    if isinstance(document, Unusable):
        return document
    listed = document.get("components") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        return Unusable("the components document has no list of components")
    entries = [entry for entry in listed if isinstance(entry, dict) and entry.get("name") == SHIM]
    if len(entries) > 1:
        return Unusable(f"{len(entries)} components call themselves {SHIM}")
    return entries[0] if entries else None
