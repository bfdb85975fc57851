"""What was found where a record belongs, and cannot be read, is never deleted silently."""

from __future__ import annotations

import json
from pathlib import Path


def kept_record(dir: Path, raw: bytes | None) -> str:
    """Whether what no shim of today can read is still there, and where."""
    if raw is None or not dir.exists():
        return ""
    aside = [file for file in dir.glob(".task.json.damaged-*") if file.read_bytes() == raw]
    if aside:
        return "set aside"
    record = dir / "task.json"
    is_untouched = record.exists() and record.read_bytes() == raw
    return "untouched" if is_untouched and not _is_ours(raw) else ""


def _is_ours(raw: bytes) -> bool:
    try:
        return bool(json.loads(raw)["version"] == 1)
    except ValueError:
        return False
