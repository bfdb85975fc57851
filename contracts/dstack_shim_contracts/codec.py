"""JSON bytes to models and back: the way into and out of every body of the API."""

from typing import Any, TypeVar

from dstack_shim_contracts.shapes import structure, unstructure
from dstack_shim_contracts.submit import validate_submit
from dstack_shim_contracts.wire import dump_json, parse_json

__all__ = ["decode", "encode", "validate_submit"]

T = TypeVar("T")


def decode(cls: type[T], raw: bytes | str) -> T:
    """Read a body. Raises :class:`~dstack_shim_contracts.errors.BodyError`.

    Members may be absent or null (then zero), unknown ones are ignored, nothing is converted.
    Halves of surrogate pairs become U+FFFD. What the types cannot say is not checked here: see
    :func:`validate_submit`.
    """
    return structure(cls, parse_json(raw))


def encode(model: Any) -> bytes:
    """Write a body as compact UTF-8 JSON, leaving out the keys that are absent by contract."""
    return dump_json(unstructure(model))
