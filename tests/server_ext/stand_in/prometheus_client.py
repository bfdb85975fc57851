"""As much of the client of Prometheus as a collector meets."""

from __future__ import annotations

from typing import Any


class Metric:
    def __init__(self, name: str, documentation: str, typ: str) -> None:
        self.name, self.documentation, self.type = name, documentation, typ
        self.samples: list[tuple[str, dict[str, str], float]] = []

    def add_sample(self, name: str, labels: dict[str, str], value: float) -> None:
        self.samples.append((name, labels, value))


class Registry:
    def __init__(self) -> None:
        self.collectors: dict[Any, list[str]] = {}

    def unregister(self, collector: Any) -> None:
        del self.collectors[collector]

    def register(self, collector: Any) -> None:
        self.collectors[collector] = [metric.name for metric in collector.collect()]


REGISTRY = Registry()
