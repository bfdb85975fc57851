"""What the shim needs to know of the machine it runs on.

Nothing here knows tasks, Docker's API or HTTP. The rules are pure functions of text (what
a tool printed, what a file said); the thin parts that fetch that text take the command
runner and the root directory as arguments, so that a test gives them its own.
"""
