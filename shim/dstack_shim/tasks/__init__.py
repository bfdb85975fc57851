"""The core: what a task is, what may happen to it, and what is left of it after a crash.

Knows protocols (engine, records, resources, clock), never Docker, HTTP or the disk itself, so
that a seeded simulation can run the real thing.
"""
