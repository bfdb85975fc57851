"""Stands in for what requests guesses encodings with: a dozen modules at each start.

Nothing that is asked here leaves its encoding open: engines and dstack speak JSON in UTF-8.
"""

from __future__ import annotations

__version__ = "3.0.0"  # requests warns about versions it does not know


def detect(byte_str: bytes) -> dict[str, object]:
    """What requests asks for text whose answer names no encoding."""
    del byte_str
    return {"encoding": "utf-8", "language": "", "confidence": 1.0}
