"""The same shapes as JSON Schema (draft 2020-12), one file each, read only when asked for.

A schema of a request, of the record or of the feature document says what a reader accepts. One of
an answer says what a shim sends, which is stricter: servers refuse a null where they expect text.
Tests hold each file against its model, so neither can drift.
"""

import json
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType
from typing import Any, Final

import attrs
from dstack_shim_contracts import api
from dstack_shim_contracts.features import FeatureDocument
from dstack_shim_contracts.record import TaskRecord


@attrs.frozen
class Shape:
    """A JSON document both sides know: its name, its model, and who reads it.

    ``lenient`` shapes are read by us, with members absent or null. The others are read by servers.
    """

    name: str
    model: type[Any]
    lenient: bool


SHAPES: Final[Mapping[str, Shape]] = MappingProxyType(
    {
        shape.name: shape
        for shape in (
            Shape("healthcheck", api.HealthcheckResponse, lenient=False),
            Shape("shutdown", api.ShutdownRequest, lenient=True),
            Shape("shutdown-refusal", api.ShutdownRefusal, lenient=False),
            Shape("instance-health", api.InstanceHealth, lenient=False),
            Shape("instance-info", api.InstanceInfo, lenient=False),
            Shape("components", api.Components, lenient=False),
            Shape("component-install", api.ComponentInstallRequest, lenient=True),
            Shape("task-list", api.TaskList, lenient=False),
            Shape("task-submit", api.TaskConfig, lenient=True),
            Shape("task-info", api.TaskInfo, lenient=False),
            Shape("task-terminate", api.TerminateRequest, lenient=True),
            Shape("task-record", TaskRecord, lenient=True),
            Shape("feature-document", FeatureDocument, lenient=False),
        )
    }
)
"""Every shape, by the name of its schema and of its directory of examples."""


def load(name: str) -> dict[str, Any]:
    """The schema of a shape. KeyError for a name that is none."""
    file = resources.files(__name__) / f"{SHAPES[name].name}.schema.json"
    schema: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return schema
