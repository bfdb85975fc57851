"""When this boot of the host began."""

from __future__ import annotations

import re
from pathlib import Path

_BOOT_TIME = re.compile(r"^btime ([0-9]+)$", re.MULTILINE)


def boot_time(root: Path = Path("/")) -> float:
    """Unix seconds at which the kernel started; 0 if it does not tell.

    0 makes every container one of this boot, so that nothing is taken for a reboot that the
    boot id does not show as well.
    """
    try:
        found = _BOOT_TIME.search((root / "proc/stat").read_text())
    except OSError:
        return 0.0
    return float(found.group(1)) if found else 0.0
