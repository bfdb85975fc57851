"""The examples are what they say: good ones are read, bad ones are refused for their rule."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from dstack_shim_contracts import golden
from dstack_shim_contracts.codec import decode, encode, validate_submit
from dstack_shim_contracts.errors import BodyError
from dstack_shim_contracts.features import read_feature_document
from dstack_shim_contracts.golden import Example
from dstack_shim_contracts.schemas import SHAPES, load
from jsonschema import Draft202012Validator, ValidationError

GOOD = [example for shape in SHAPES for example in golden.good(shape)]
BAD = [example for shape in SHAPES for example in golden.bad(shape)]

# Rules JSON Schema has no words for, or Python's reading of its patterns does not see.
BEYOND_SCHEMAS = {
    "gpu-is-1.0",
    "memory-is-1.0",
    "name-ends-in-a-newline",
    "nested-too-deep",
    "shm-size-is-1.0",
    "timeout-is-1.0",
    "version-is-1.0",
    "volume-name-is-too-many-bytes",
}

# Readers of a record fold letter case, which no schema can.
FOR_READERS = {"other-letter-case"}

# Records have a reader and tests of their own.
REQUESTS = {name for name, shape in SHAPES.items() if shape.lenient} - {"task-record"}


def is_json(example: Example) -> bool:
    try:
        json.loads(example.raw.decode(), parse_constant=lambda _: json.loads("not JSON"))
    except ValueError:
        return False  # no schema gets to see it
    return True


def read(example: Example) -> Any:
    if example.shape == "feature-document":
        return read_feature_document(example.raw)
    model = decode(SHAPES[example.shape].model, example.raw)
    if example.shape == "task-submit":
        validate_submit(model)
    return model


def path_of(error: ValidationError) -> str:
    path = ".".join(
        f"[{step}]" if isinstance(step, int) else str(step) for step in error.absolute_path
    ).replace(".[", "[")
    if error.validator == "required":
        missing = re.findall("'(.*)' is a required property", error.message)
        path = f"{path}.{missing[0]}" if path else missing[0]
    return path or "body"


def paths_of(errors: Any) -> set[str]:
    """Every place a schema objects to, within alternatives too."""
    found = set()
    for error in errors:
        found |= paths_of(error.context) if error.context else {path_of(error)}
    return found


def objections(example: Example) -> set[str]:
    schema = Draft202012Validator(load(example.shape))
    return paths_of(schema.iter_errors(json.loads(example.raw)))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_has_good_and_bad_examples(shape: str) -> None:
    assert golden.good(shape)
    assert golden.bad(shape)


def test_every_listed_field_has_its_example() -> None:
    listed = json.loads((golden._HERE / "bad" / "fields.json").read_text(encoding="utf-8"))
    assert set(listed) == {str(example) for example in BAD}


@pytest.mark.parametrize("example", [e for e in GOOD if e.name not in FOR_READERS], ids=str)
def test_a_good_example_fits_its_schema(example: Example) -> None:
    assert objections(example) == set()


@pytest.mark.parametrize("example", [e for e in GOOD if e.shape != "task-record"], ids=str)
def test_a_good_example_is_read_and_written_back_to_fit_its_schema(example: Example) -> None:
    document = json.loads(encode(read(example)))
    schema = Draft202012Validator(load(example.shape))
    assert list(schema.iter_errors(document)) == []


@pytest.mark.parametrize("example", [e for e in BAD if e.shape in REQUESTS], ids=str)
def test_a_bad_body_is_refused_naming_its_field(example: Example) -> None:
    with pytest.raises(BodyError) as caught:
        read(example)
    assert caught.value.field == example.field


@pytest.mark.parametrize("example", [e for e in BAD if is_json(e)], ids=str)
def test_a_bad_document_is_refused_by_its_schema_at_its_field(example: Example) -> None:
    found = objections(example)
    if example.name in BEYOND_SCHEMAS:
        assert found == set()
    else:
        # A schema may stop at the object that a reader goes on to look into.
        assert any(f"{example.field}.".startswith(f"{path}.") for path in found)


def test_an_example_shows_its_name_and_not_its_bytes() -> None:
    example = Example("task-submit", "least", b"secret")
    assert str(example) == "task-submit/least"
    assert "secret" not in repr(example)
