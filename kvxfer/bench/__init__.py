"""Load, engine processes, the demo and measurements."""
