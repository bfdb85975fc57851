"""What hypothesis draws: models of any shape, JSON of any kind, instances of a schema."""

from __future__ import annotations

import functools
import types
from enum import Enum
from typing import Any, Union, get_args, get_origin

import attrs
from dstack_shim_contracts.api import SHIM, Component, FeaturelessComponent
from dstack_shim_contracts.record import TaskRecord
from dstack_shim_contracts.shapes import INT_MAX, INT_MIN
from dstack_shim_contracts.wire import Wire, wire_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

SAMPLE = settings(
    max_examples=25,
    deadline=None,  # a busy machine is not a finding
    suppress_health_check=[HealthCheck.too_slow],
)

FINITE = st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | st.integers(INT_MIN, INT_MAX) | FINITE | st.text(max_size=8)
JSON_VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
UNKNOWN_KEYS = st.dictionaries(
    st.text(max_size=12).map(lambda text: f"later_{text}"), JSON_VALUES, max_size=3
)


def models(cls: Any) -> st.SearchStrategy[Any]:
    """Any model of a class that can be written and read back."""
    return _models(cls)


@functools.cache
def _models(cls: Any) -> st.SearchStrategy[Any]:
    members = {attribute.name: _member(attribute) for attribute in attrs.fields(cls)}
    if cls is TaskRecord:
        members["min_reader"] = st.just(1)
    made = st.builds(cls, **members)
    return made.map(_only_the_shim_shows_features) if issubclass(cls, Component) else made


def _only_the_shim_shows_features(component: Component) -> Component:
    lists = component.name == SHIM and not isinstance(component, FeaturelessComponent)
    return component if lists else attrs.evolve(component, features=None)


def _member(attribute: attrs.Attribute[Any]) -> st.SearchStrategy[Any]:
    note = wire_of(attribute.metadata)
    if note.hidden:
        return UNKNOWN_KEYS
    if attribute.name == "id":
        return st.text(min_size=1, max_size=12)
    if attribute.name == "name":
        return st.just(SHIM) | st.text(max_size=12)
    return _of_kind(attribute.type, note)


def _of_kind(kind: Any, note: Wire) -> st.SearchStrategy[Any]:
    if get_origin(kind) in {Union, types.UnionType}:
        (inner,) = (option for option in get_args(kind) if option is not type(None))
        return st.none() | _of_kind(inner, note)
    if get_origin(kind) is tuple:
        return st.lists(_of_kind(get_args(kind)[0], note), max_size=3).map(tuple)
    if attrs.has(kind):
        return models(kind)
    if issubclass(kind, Enum):
        return st.sampled_from(kind)
    if kind is int and note.choices:
        return st.sampled_from(note.choices)
    lowest = INT_MIN if note.minimum is None else note.minimum
    scalars: dict[type, st.SearchStrategy[Any]] = {
        str: st.text(max_size=12),
        bool: st.booleans(),
        int: st.integers(lowest, INT_MAX),
        float: FINITE,
    }
    return scalars[kind]


def instances(
    schema: dict[str, Any], root: dict[str, Any] | None = None
) -> st.SearchStrategy[Any]:
    """Instances of one of our schemas: of the part of JSON Schema they use, and no more."""
    root = root or schema
    if "$ref" in schema:
        return instances(root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root)
    if "anyOf" in schema:
        return st.one_of([instances(option, root) for option in schema["anyOf"]])
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return st.one_of([_of_type(kind, schema, root) for kind in kinds])


def _of_type(kind: str, schema: dict[str, Any], root: dict[str, Any]) -> st.SearchStrategy[Any]:
    if kind == "object":
        return _objects(schema, root)
    if kind == "array":
        return st.lists(instances(schema["items"], root), max_size=3)
    if kind == "string":
        return _texts(schema)
    if kind == "integer":
        return st.integers(schema["minimum"], schema["maximum"])
    if kind == "number":
        bounds = schema.get("minimum"), schema.get("maximum")
        return st.floats(*bounds, allow_nan=False, allow_infinity=False)
    return {"boolean": st.booleans(), "null": st.none()}[kind]


def _objects(schema: dict[str, Any], root: dict[str, Any]) -> st.SearchStrategy[Any]:
    required = schema.get("required", [])
    members = {key: instances(part, root) for key, part in schema["properties"].items()}
    known = st.fixed_dictionaries(
        {key: members[key] for key in required},
        optional={key: part for key, part in members.items() if key not in required},
    )
    return st.tuples(UNKNOWN_KEYS, known).map(lambda both: {**both[0], **both[1]})


def _texts(schema: dict[str, Any]) -> st.SearchStrategy[str]:
    if "pattern" not in schema:
        return st.text(min_size=schema.get("minLength", 0), max_size=12)
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength", 100)
    texts = st.from_regex(schema["pattern"], fullmatch=True, alphabet=st.characters(codec="utf-8"))
    return texts.filter(lambda text: shortest <= len(text) <= longest and not text.endswith("\n"))
