"""
Why the extension stays inactive. None of these ever leaves the extension: `activation` turns each
into the one line an operator reads in the server's log.

    ShimRestartError
    ├── InvalidSettings   an environment variable of ours has a value we do not understand
    └── NotPatchable      this server has no decision code that we can or may take over
"""


class ShimRestartError(Exception):
    """The extension cannot become active; the message is for the operator."""


class InvalidSettings(ShimRestartError):
    """Raised while reading the environment: names every bad variable and what was expected."""


class NotPatchable(ShimRestartError):
    """Raised while looking at the server's code: what is missing, or why it is not trusted."""
