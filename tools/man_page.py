"""docs/dstack-shim.1 from the tables of flags and commands; ``--check`` only compares."""

from __future__ import annotations

import sys
from pathlib import Path

from dstack_shim.console.manual import man_page
from tools.generated import write_or_check

PAGE = Path(__file__).parent.parent / "docs" / "dstack-shim.1"


def main(arguments: list[str]) -> int:
    """Write the page, or tell whether it is the one that would be written."""
    return write_or_check(PAGE, man_page(), arguments, "tools.man_page")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
