"""JSON text, and what a field's Python type cannot say about its place in JSON."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

import attrs
from dstack_shim_contracts.errors import BodyError

BODY: Final = "body"
"""How error messages call the document as a whole."""

MAX_NESTING: Final = 64
"""Deepest document read; no shape comes near. What was read can be written from any call depth,
and no interpreter's recursion limit decides what is accepted."""

_WIRE: Final = "wire"
_LONGEST_EXACT_INTEGER: Final = 640  # the least limit Python may be set to for int(str)
_STRING_OR_BRACKET: Final = re.compile(r'"(?:[^"\\]+|\\.)*"?|[\[\]{}]', re.DOTALL)
_LONE_SURROGATE: Final = re.compile("[\ud800-\udfff]")


@attrs.frozen
class Wire:
    """What the type of a field leaves open.

    ``left_out(model, value)`` is true where the key is not written. ``minimum`` and ``choices``
    narrow an integer. A ``hidden`` field is not part of the JSON object.
    """

    left_out: Callable[[Any, Any], bool] | None = None
    minimum: int | None = None
    choices: tuple[int, ...] = ()
    hidden: bool = False


_PLAIN: Final = Wire()


def wire(
    *,
    left_out: Callable[[Any, Any], bool] | None = None,
    minimum: int | None = None,
    choices: tuple[int, ...] = (),
    hidden: bool = False,
) -> dict[str, Wire]:
    """Metadata for :func:`attrs.field`."""
    return {_WIRE: Wire(left_out, minimum, choices, hidden)}


def wire_of(metadata: Mapping[Any, Any]) -> Wire:
    """The note within a field's metadata."""
    note: Wire = metadata.get(_WIRE, _PLAIN)
    return note


def left_out_if_none(_model: object, value: object) -> bool:
    """For fields whose key is absent rather than null."""
    return value is None


def left_out_if_empty(_model: object, value: object) -> bool:
    """For fields of ours that another shim need not see unless they are used."""
    return not value


def parse_json(raw: bytes | str) -> object:
    """Read one JSON document and nothing after it.

    Of keys given twice the last one counts, and stands where the last one stood. Raises
    :class:`BodyError` naming the position for whatever is not JSON: other encodings than UTF-8,
    a byte order mark, NaN, trailing data, or nesting too deep to be read.
    """
    try:
        text = raw if isinstance(raw, str) else raw.decode("utf-8")
        _check_nesting(text)
        return json.loads(
            text,
            object_pairs_hook=_last_of_each_key,
            parse_int=_integer,
            parse_constant=_refuse_constant,
        )
    except UnicodeDecodeError as error:
        raise BodyError(BODY, f"UTF-8, broken at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise BodyError(BODY, f"JSON, broken at {_position(error)}") from None


def dump_json(document: object) -> bytes:
    """Write a document as compact UTF-8. Raises ValueError for NaN and infinities."""
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return whole_text(text).encode("utf-8")


def whole_text(text: str) -> str:
    """Replace halves of surrogate pairs with U+FFFD, as Go does: they fit in no UTF-8."""
    return text if text.isascii() else _LONE_SURROGATE.sub("\ufffd", text)


def _check_nesting(text: str) -> None:
    if text.count("[") + text.count("{") <= MAX_NESTING:
        return
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        if match[0] in "[{":
            depth += 1
        elif match[0] in "]}":
            depth -= 1
        if depth > MAX_NESTING:
            raise BodyError(BODY, f"JSON, nested at most {MAX_NESTING} deep")


def _position(error: json.JSONDecodeError) -> str:
    return f"line {error.lineno} column {error.colno} ({error.msg})"


def _last_of_each_key(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for key, value in pairs:
        members.pop(key, None)
        members[key] = value
    return members


def _integer(digits: str) -> int | float:
    # int() of a very long literal raises (and is slow where it does not); as a float it is out
    # of every integer's range, which is all anyone needs to know about it.
    return int(digits) if len(digits) <= _LONGEST_EXACT_INTEGER else float(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise BodyError(BODY, f"JSON, which has no {name}")
