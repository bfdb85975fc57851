"""
Figures for Prometheus: in the server's own /metrics, and as text for the command line.

What concerns all servers comes from the record and is the same in each; decisions are counted by
each process.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import attrs

from dstack_shim_server.guard import shielded
from dstack_shim_server.journal import Tally
from dstack_shim_server.record.batch import Snapshot
from dstack_shim_server.record.recorder import Recorder

PREFIX = "dstack_shim_restart_"


@attrs.frozen
class Family:
    """One metric: name without prefix, kind, help, and values by labels."""

    name: str
    kind: str
    help: str
    samples: Sequence[tuple[Mapping[str, str], float]]


def families(snapshot: Snapshot) -> Iterator[Family]:
    """Yield what the record says."""
    state = snapshot.state
    yield Family("instances", "gauge", "Instances by state.", _by("state", snapshot.by_state))
    yield Family(
        "restarts", "counter", "Finished restarts by outcome.", _by("outcome", snapshot.by_outcome)
    )
    yield _one("restarts_under_way", "Restarts without an outcome.", len(state.under_way))
    stopped = [({"version": version}, 1.0) for version in sorted(state.stops)]
    yield Family("stopped_versions", "gauge", "Versions not rolled out any further.", stopped)
    yield _one(
        "paused", "1 if the roll-out is paused from the command line.", bool(state.paused_by)
    )


def decision_family(tally: Tally) -> Family:
    """Return what this process decided."""
    return Family(
        "decisions",
        "counter",
        "Answers to dstack's question whether a shim may be restarted.",
        _by("answer", tally.counts()),
    )


def as_text(found: Sequence[Family]) -> str:
    """Write families in Prometheus' text format."""
    lines = []
    for family in found:
        name = PREFIX + family.name
        full = f"{name}_total" if family.kind == "counter" else name
        lines += [f"# HELP {full} {family.help}", f"# TYPE {full} {family.kind}"]
        lines += [f"{full}{_labels(labels)} {value:g}" for labels, value in family.samples]
    return "\n".join(lines) + "\n"


@attrs.frozen(eq=False)  # a registry keeps collectors by identity
class Collector:
    """What the registry of prometheus_client asks when somebody scrapes the server."""

    recorder: Recorder
    tally: Tally
    metric: Any  # prometheus_client's class of a family

    def collect(self) -> Sequence[Any]:
        """Return all families; none if we fail: the server's own must go out."""
        return shielded("collecting metrics", self._collect, list)

    def _collect(self) -> list[Any]:
        found = [decision_family(self.tally)]
        if not self.recorder.trouble:
            found += families(self.recorder.snapshot)
        return [self._made(family) for family in found]

    def _made(self, family: Family) -> Any:
        made = self.metric(PREFIX + family.name, family.help, family.kind)
        suffix = "_total" if family.kind == "counter" else ""
        for labels, value in family.samples:
            made.add_sample(f"{PREFIX}{family.name}{suffix}", dict(labels), value)
        return made


# A registry takes no name twice.
_registered: WeakKeyDictionary[Any, Collector] = WeakKeyDictionary()


def register(client: ModuleType, recorder: Recorder, tally: Tally) -> None:
    """Let the server's own /metrics show ours, instead of those of a load before in this process."""
    registry = client.REGISTRY
    if registry in _registered:
        registry.unregister(_registered.pop(registry))
    collector = Collector(recorder, tally, client.Metric)
    registry.register(collector)
    _registered[registry] = collector


def _one(name: str, words: str, value: float) -> Family:
    return Family(name, "gauge", words, [({}, float(value))])


def _by(label: str, counts: Mapping[str, int]) -> Sequence[tuple[Mapping[str, str], float]]:
    return [({label: word}, float(count)) for word, count in sorted(counts.items())]


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
