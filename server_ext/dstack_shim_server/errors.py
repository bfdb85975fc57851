"""
What can go wrong by itself. None of these ever leaves the extension: `activation` turns the first
two into the one line an operator reads in the server's log, the record's thread logs the third, and
the command line tells it.

    ShimRestartError
    ├── InvalidSettings   an environment variable of ours has a value we do not understand
    ├── NotPatchable      this server has no decision code that we can or may take over
    └── RecordUnusable    the database answers, but the record in it cannot be used
"""


class ShimRestartError(Exception):
    """Something of ours cannot be used; the message is for the operator."""


class InvalidSettings(ShimRestartError):
    """Raised while reading the environment: names every bad variable and what was expected."""


class NotPatchable(ShimRestartError):
    """Raised while looking at the server's code: what is missing, or why it is not trusted."""


class RecordUnusable(ShimRestartError):
    """Raised by the record: its tables are not there or of another version, and what that means."""
