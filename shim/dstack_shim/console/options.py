"""Values of the commands' options, read."""

from __future__ import annotations

from dstack_shim.errors import UsageError
from dstack_shim.settings import Invocation


def lines_wanted(invocation: Invocation, default: int) -> int | None:
    """How many lines ``--lines`` asks for; None for all.

    Raises ``UsageError``.
    """
    text = invocation.options.get("lines", str(default))
    if text == "all":
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise UsageError(f"--lines: {text!r} is not a number of lines; expected one, or all")
    return int(text)
