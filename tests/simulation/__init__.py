"""The real core in a seeded world: engine, disk and host in memory, time that jumps.

``python -m tests.simulation SEED`` runs one seed and, should it fail, shrinks its schedule and
prints what happened. See ``world.py`` for what a world is and ``census.py`` for what must hold.
"""
