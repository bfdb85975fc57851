"""``python -m dstack_shim`` is ``dstack-shim``."""

import sys

from dstack_shim.cli import main

sys.exit(main())
