"""docs/dstack-shim.1 from the tables of flags and commands; ``--check`` only compares."""

from __future__ import annotations

import sys
from pathlib import Path

from dstack_shim.console.manual import man_page

PAGE = Path(__file__).parent.parent / "docs" / "dstack-shim.1"


def main(arguments: list[str]) -> int:
    """Write the page, or tell whether it is the one that would be written."""
    if arguments == ["--check"]:
        if PAGE.read_text(encoding="utf-8") == man_page():
            return 0
        print(f"{PAGE}: not as the tables say; run python -m tools.man_page", file=sys.stderr)
        return 1
    PAGE.write_text(man_page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
