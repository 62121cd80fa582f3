"""No test asserts on wall time: on a busy machine an example may take what it takes."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
