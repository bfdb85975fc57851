"""The restore matrix: task × container × record, each with the outcome written down.

What must be is in ``expected.md`` and nowhere else; ``cells.py`` reads it, ``records.py`` makes
what lies on the disk, ``fake_host.py`` and ``real_host.py`` make the containers.
"""
