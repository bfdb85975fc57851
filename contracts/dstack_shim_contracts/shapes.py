"""From parsed JSON to attrs models and back, by the rules of the shim's API.

Every member of an object may be absent or null and is then the default of its field, or the zero
value of its type ("" , 0, false, no elements, no object). Unknown members are ignored. Nothing is
converted: an integer is neither ``1.0`` nor ``true`` nor ``"1"``.
"""

import functools
import math
import types
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final, TypeVar, Union, cast, get_args, get_origin

import attrs
from dstack_shim_contracts.errors import BodyError
from dstack_shim_contracts.wire import BODY, Wire, whole_text, wire_of

T = TypeVar("T")

Reader = Callable[[object, str], Any]
"""Turns a JSON value into a Python one; the second argument is its path."""

INT_MIN: Final = -(2**63)
INT_MAX: Final = 2**63 - 1
"""Range of an integer: Go's ``int`` and ``int64`` on every platform a shim runs on."""


def structure(cls: type[T], document: object, *, any_case: bool = False) -> T:
    """Make a model out of parsed JSON, or raise :class:`BodyError` naming the member.

    With ``any_case`` members match their fields in any letter case, the last one winning.
    """
    model = _object_reader(cls, any_case)(document, "")
    return cast("T", model)


def unstructure(model: Any) -> dict[str, object]:
    """Make a JSON object out of a model."""
    members = {}
    for attribute in attrs.fields(type(model)):
        note, value = wire_of(attribute.metadata), getattr(model, attribute.name)
        if note.hidden or (note.left_out is not None and note.left_out(model, value)):
            continue
        members[attribute.name] = _plain(value)
    return members


def keys_of(cls: type[Any]) -> tuple[str, ...]:
    """The JSON keys of a model, in the order they are written."""
    return tuple(
        attribute.name for attribute in attrs.fields(cls) if not wire_of(attribute.metadata).hidden
    )


def fold(key: str) -> str:
    """Letter case folding of Go's JSON package: keys that fold alike name the same member."""
    # lower() covers the Kelvin sign; the long s is the other letter outside ASCII that folds
    # onto one within. casefold() would go further than Go (the sharp s).
    return key.lower().replace("\u017f", "s")


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return unstructure(value) if attrs.has(type(value)) else value


def _object_reader(cls: Any, any_case: bool) -> Reader:
    def read(value: object, path: str) -> Any:
        if type(value) is not dict:
            raise _mismatch(path or BODY, "an object", value)
        given = {fold(key): item for key, item in value.items()} if any_case else value
        members = {}
        for name, has_default, read_member in _members(cls, any_case):
            item = given.get(name)
            if item is not None or not has_default:
                members[name] = read_member(item, f"{path}.{name}" if path else name)
        return cls(**members)

    return read


@functools.cache
def _members(cls: Any, any_case: bool) -> tuple[tuple[str, bool, Reader], ...]:
    # Built on first use, not at import: most processes meet only a few of the shapes.
    return tuple(
        (attribute.name, attribute.default is not attrs.NOTHING, reader)
        for attribute in attrs.fields(cls)
        if not (note := wire_of(attribute.metadata)).hidden
        for reader in (_reader(attribute.type, note, any_case),)
    )


def _reader(kind: Any, note: Wire, any_case: bool) -> Reader:
    if get_origin(kind) in {Union, types.UnionType}:
        (inner,) = (option for option in get_args(kind) if option is not type(None))
        return _or_null(_reader(inner, note, any_case), lambda _path: None)
    if get_origin(kind) is tuple:
        read = _list_reader(_reader(get_args(kind)[0], note, any_case))
        return _or_null(read, lambda _path: ())
    if attrs.has(kind):
        read = _object_reader(kind, any_case)
        return _or_null(read, functools.partial(read, {}))
    if issubclass(kind, Enum):
        return _enum_reader(kind)
    return _or_null(_scalar_reader(kind, note), lambda _path: kind())


def _or_null(read: Reader, zero: Callable[[str], Any]) -> Reader:
    return lambda value, path: zero(path) if value is None else read(value, path)


def _list_reader(read_item: Reader) -> Reader:
    def read(value: object, path: str) -> tuple[Any, ...]:
        if type(value) is not list:
            raise _mismatch(path, "a list", value)
        return tuple(read_item(item, f"{path}[{index}]") for index, item in enumerate(value))

    return read


def _enum_reader(kind: type[Enum]) -> Reader:
    words: Mapping[object, Enum] = {member.value: member for member in kind}
    expected = "one of " + ", ".join(str(word) for word in words)

    def read(value: object, path: str) -> Enum:
        if type(value) is not str or value not in words:
            raise BodyError(path, expected)
        return words[value]

    return read


def _scalar_reader(kind: type[Any], note: Wire) -> Reader:
    if kind is int:
        return functools.partial(_read_integer, note)
    return {str: _read_text, bool: _read_bool, float: _read_float}[kind]


def _read_text(value: object, path: str) -> str:
    if type(value) is not str:
        raise _mismatch(path, "a string", value)
    return whole_text(value)


def _read_bool(value: object, path: str) -> bool:
    if type(value) is not bool:
        raise _mismatch(path, "true or false", value)
    return value


def _read_float(value: object, path: str) -> float:
    if type(value) is not int and type(value) is not float:
        raise _mismatch(path, "a number", value)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise BodyError(path, "a number that fits 64 bits")
    return number


def _read_integer(note: Wire, value: object, path: str) -> int:
    if type(value) is not int:
        raise _mismatch(path, "an integer", value)
    if not INT_MIN <= value <= INT_MAX:
        raise BodyError(path, "an integer that fits 64 bits")
    if note.minimum is not None and value < note.minimum:
        raise BodyError(path, f"an integer not below {note.minimum}")
    if note.choices and value not in note.choices:
        raise BodyError(path, "one of " + ", ".join(map(str, note.choices)))
    return value


def _mismatch(path: str, expected: str, value: object) -> BodyError:
    # The kind only: the value may be a secret.
    return BodyError(path, f"{expected}, got {_KINDS[type(value)]}")


_KINDS: Final[Mapping[type, str]] = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number with a fraction or exponent",
    type(None): "null",
}
