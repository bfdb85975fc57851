"""Schemas and models say the same, so that neither can drift."""

from __future__ import annotations

import functools
import json
import re
import types
from enum import Enum
from importlib import resources
from typing import Any, Union, get_args, get_origin

import attrs
import pytest
from dstack_shim_contracts import schemas
from dstack_shim_contracts.api import TaskConfig
from dstack_shim_contracts.codec import decode, encode, validate_submit
from dstack_shim_contracts.features import read_feature_document
from dstack_shim_contracts.record import READER, VERSION, TaskRecord, read_record, write_record
from dstack_shim_contracts.schemas import SHAPES, Shape, load
from dstack_shim_contracts.shapes import INT_MAX, INT_MIN, keys_of, unstructure
from dstack_shim_contracts.submit import (
    MAX_CPU,
    MAX_ID_LENGTH,
    MAX_ITEMS,
    MAX_NAME_LENGTH,
    MAX_VOLUME_NAME_BYTES,
)
from dstack_shim_contracts.wire import Wire, left_out_if_none, wire_of
from hypothesis import assume, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.contracts.strategies import SAMPLE, instances, models

ALL = [pytest.param(shape, id=name) for name, shape in SHAPES.items()]

NO_NUL = r"^[^\u0000]*$"
CONTROL = r"\u0000-\u001f\u007f-\u009f"
FILE_NAME = {"type": "string", "minLength": 1, "pattern": rf"^(?!\.{{1,2}}$)[^/{CONTROL}]+$"}
PATH = {"type": "string", "pattern": rf"^(?!.*/\.\.(/|$))/[^{CONTROL}]*$"}
OPTIONAL_INT = {"type": ["integer", "null"], "maximum": INT_MAX}

# What a schema says beyond the types of the model: rules that code of ours enforces as well, which
# the generated instances and the bad examples prove.
RULES: dict[tuple[str, str], dict[str, Any]] = {
    ("HealthcheckResponse", "service"): {"const": "dstack-shim"},
    ("FeatureDocument", "name"): {"const": "dstack-shim"},
    ("FeatureDocument", "version"): {"type": "string", "minLength": 1},
    ("TaskRecord", "id"): {"type": "string", "minLength": 1},
    ("TaskRecord", "min_reader"): {**OPTIONAL_INT, "minimum": 1, "maximum": READER},
}
SUBMIT_RULES: dict[tuple[str, str], dict[str, Any]] = {
    ("TaskConfig", "id"): {**FILE_NAME, "maxLength": MAX_ID_LENGTH},
    ("TaskConfig", "name"): {
        "type": "string",
        "minLength": 1,
        "maxLength": MAX_NAME_LENGTH,
        "pattern": "^[a-zA-Z0-9][a-zA-Z0-9_.-]*$",
    },
    ("TaskConfig", "image_name"): {"type": "string", "minLength": 1, "pattern": NO_NUL},
    ("TaskConfig", "gpu"): {**OPTIONAL_INT, "minimum": -1},
    ("TaskConfig", "cpu"): {"type": ["number", "null"], "minimum": 0, "maximum": MAX_CPU},
    ("TaskConfig", "memory"): {**OPTIONAL_INT, "minimum": 0},
    ("TaskConfig", "shm_size"): {**OPTIONAL_INT, "minimum": 0},
    ("TaskConfig", "network_mode"): {"enum": ["", "host", "bridge", None]},
    ("VolumeInfo", "name"): {**FILE_NAME, "maxLength": MAX_VOLUME_NAME_BYTES},
    ("VolumeInfo", "device_name"): {
        "type": ["string", "null"],
        "pattern": r"^(?!([\s\S]*/)?\.\.(/|$))[^\u0000]*$",
    },
    ("VolumeMount", "name"): {**FILE_NAME, "maxLength": MAX_VOLUME_NAME_BYTES},
    ("VolumeMount", "path"): PATH,
    ("InstanceMount", "instance_path"): PATH,
    ("InstanceMount", "path"): PATH,
    ("GpuDevice", "path_on_host"): PATH,
    ("GpuDevice", "path_in_container"): PATH,
}


class Derived:
    """The schema that follows from a model, made without looking at any file."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._definitions: dict[str, Any] = {}
        self._rules = RULES | (SUBMIT_RULES if shape.name == "task-submit" else {})

    def schema(self) -> dict[str, Any]:
        derived = self._object(self._shape.model)
        if self._shape.model is TaskRecord:
            derived["properties"]["version"] = {"const": VERSION}
            derived["required"].append("version")
        return {**derived, "$defs": self._definitions} if self._definitions else derived

    def _object(self, cls: type[Any]) -> dict[str, Any]:
        properties, required = {}, []
        for attribute in attrs.fields(cls):
            note = wire_of(attribute.metadata)
            if note.hidden:
                continue
            rule = self._rules.get((cls.__name__, attribute.name))
            part = rule or self._member(attribute, note)
            properties[attribute.name] = part
            if self._is_required(part, note):
                required.append(attribute.name)
        made: dict[str, Any] = {"type": "object", "properties": properties}
        return {**made, "required": required} if required else made

    def _is_required(self, part: dict[str, Any], note: Wire) -> bool:
        if not self._shape.lenient:
            return note.left_out is None
        nullable = (
            "anyOf" in part or None in part.get("enum", ()) or "null" in part.get("type", ())
        )
        return not nullable

    def _member(self, attribute: attrs.Attribute[Any], note: Wire) -> dict[str, Any]:
        kind = attribute.type
        if note.left_out is left_out_if_none and not self._shape.lenient:
            (kind,) = (option for option in get_args(kind) if option is not type(None))
        return self._value(kind, note)

    def _value(self, kind: Any, note: Wire) -> dict[str, Any]:
        """A value as readers of the shape see it: null where they take it for zero."""
        is_word = isinstance(kind, type) and issubclass(kind, Enum)
        ruled = any(owner == getattr(kind, "__name__", "") for owner, _ in SUBMIT_RULES)
        zero_breaks_a_rule = self._shape.name == "task-submit" and ruled
        part = self._plain(kind, note)
        return part if is_word or zero_breaks_a_rule or not self._shape.lenient else or_null(part)

    def _plain(self, kind: Any, note: Wire) -> dict[str, Any]:
        if get_origin(kind) in {Union, types.UnionType}:
            (inner,) = (option for option in get_args(kind) if option is not type(None))
            return or_null(self._plain(inner, note))
        if get_origin(kind) is tuple:
            bound = {"maxItems": MAX_ITEMS} if self._shape.name == "task-submit" else {}
            return {"type": "array", **bound, "items": self._value(get_args(kind)[0], Wire())}
        if attrs.has(kind):
            return self._reference(kind)
        if issubclass(kind, Enum):
            return {"enum": [member.value for member in kind]}
        if kind is int:
            return self._integer(note)
        names = {str: "string", bool: "boolean", float: "number"}
        text = kind is str and self._shape.name == "task-submit"
        return {"type": names[kind], **({"pattern": NO_NUL} if text else {})}

    def _integer(self, note: Wire) -> dict[str, Any]:
        if note.choices:
            return {"enum": list(note.choices)}
        lowest = INT_MIN if note.minimum is None else note.minimum
        return {"type": "integer", "minimum": lowest, "maximum": INT_MAX}

    def _reference(self, cls: type[Any]) -> dict[str, Any]:
        name = re.sub("(?<!^)([A-Z])", r"-\1", cls.__name__).lower()
        if name not in self._definitions:
            self._definitions[name] = self._object(cls)
        return {"$ref": f"#/$defs/{name}"}


def or_null(part: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in part:
        return {"anyOf": [part, {"type": "null"}]}
    if "enum" in part:
        return {"enum": [*part["enum"], None]}
    if "anyOf" in part or isinstance(part["type"], list):
        return part
    return {**part, "type": [part["type"], "null"]}


def bare(schema: Any) -> Any:
    """A schema without what is for people, and with lists of names in one order."""
    if not isinstance(schema, dict):
        return schema
    words = {"$schema", "title", "description"}
    kept = {
        key: part for key, part in schema.items() if key not in words or isinstance(part, dict)
    }
    return {
        key: sorted(part)
        if key == "required"
        else bare(part)
        if key != "anyOf"
        else map_bare(part)
        for key, part in kept.items()
    }


def map_bare(parts: list[Any]) -> list[Any]:
    return [bare(part) for part in parts]


def errors(shape: Shape, document: object) -> list[str]:
    validator = Draft202012Validator(load(shape.name))
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]


@pytest.mark.parametrize("shape", ALL)
def test_a_schema_is_exactly_what_follows_from_its_model(shape: Shape) -> None:
    assert bare(load(shape.name)) == bare(Derived(shape).schema())


@pytest.mark.parametrize("shape", ALL)
def test_a_schema_is_one_and_describes_every_member(shape: Shape) -> None:
    schema = load(shape.name)
    Draft202012Validator.check_schema(schema)
    assert schema["title"] == shape.name
    objects = [schema, *schema.get("$defs", {}).values()]
    undescribed = [
        key
        for part in objects
        for key, member in part["properties"].items()
        if not member.get("description", "").endswith(".")
    ]
    assert undescribed == []
    assert all(part["description"].endswith(".") for part in objects)


def test_every_file_is_the_schema_of_a_shape() -> None:
    files = {
        file.name for file in resources.files(schemas).iterdir() if file.name.endswith("json")
    }
    assert files == {f"{name}.schema.json" for name in SHAPES}


def test_there_is_no_schema_of_another_name() -> None:
    with pytest.raises(KeyError):
        load("../golden/bad/fields")


@pytest.mark.parametrize("shape", [SHAPES[name] for name in SHAPES if name != "task-submit"])
@SAMPLE
@given(data=st.data())
def test_whatever_a_model_holds_fits_its_schema(shape: Shape, data: st.DataObject) -> None:
    model = data.draw(models(shape.model))
    if shape.name in {"healthcheck", "feature-document"}:
        key = "service" if shape.name == "healthcheck" else "name"
        model = attrs.evolve(model, **{key: "dstack-shim"})
        assume(model.version)
    raw = write_record(model) if shape.model is TaskRecord else encode(model)
    assert errors(shape, json.loads(raw)) == []


@functools.cache
def instances_of(name: str) -> st.SearchStrategy[Any]:
    return instances(load(name))


def read(shape: Shape, document: object) -> Any:
    raw = json.dumps(document).encode()
    if shape.name == "task-record":
        return read_record(raw)
    if shape.name == "feature-document":
        return read_feature_document(raw)
    model = decode(shape.model, raw)
    if shape.name == "task-submit":
        validate_submit(model)
    return model


def names_fit_a_mount_point(config: dict[str, Any]) -> bool:
    named = [*(config.get("volumes") or []), *(config.get("volume_mounts") or [])]
    return all(len(item["name"].encode()) <= MAX_VOLUME_NAME_BYTES for item in named)


@pytest.mark.parametrize("shape", ALL)
@SAMPLE
@given(data=st.data())
def test_whatever_fits_a_schema_is_read(shape: Shape, data: st.DataObject) -> None:
    document = data.draw(instances_of(shape.name))
    if shape.name == "task-submit":
        assume(names_fit_a_mount_point(document))
    model = read(shape, document)
    if shape.lenient:
        return
    # What servers read has one form: nothing known is lost, changed or added.
    known = {key: value for key, value in document.items() if key in keys_of(shape.model)}
    again = json.loads(encode(model))
    assert errors(shape, again) == []
    assert without_unknown(again, known) == known


def without_unknown(again: Any, known: Any) -> Any:
    """``known``, with every value taken from ``again`` as far as that has it."""
    if isinstance(known, dict) and isinstance(again, dict):
        return {
            key: without_unknown(again[key], value) if key in again else value
            for key, value in known.items()
        }
    if isinstance(known, list) and isinstance(again, list) and len(known) == len(again):
        return [without_unknown(one, other) for one, other in zip(again, known, strict=True)]
    return again


@SAMPLE
@given(data=st.data())
def test_an_accepted_task_fits_the_schema_of_the_submit_and_of_the_record(
    data: st.DataObject,
) -> None:
    document = data.draw(instances_of("task-submit"))
    assume(names_fit_a_mount_point(document))
    config = read(SHAPES["task-submit"], document)
    assert isinstance(config, TaskConfig)
    assert errors(SHAPES["task-submit"], unstructure(config)) == []
    record = json.loads(write_record(TaskRecord(config.id, config)))
    assert errors(SHAPES["task-record"], record) == []
