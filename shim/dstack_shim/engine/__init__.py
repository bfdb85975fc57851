"""The Docker Engine as the shim sees it.

``protocol`` has the words, ``container`` says what a task's container looks like, ``pull``
counts and reads image pulls, ``docker`` alone knows the SDK.
"""
