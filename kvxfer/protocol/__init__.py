"""Sans-IO state machines of a handoff: no socket, no thread, no clock, no NIXL, no vLLM.

Each machine takes events together with a time and returns actions. ``source`` and ``sink`` are the two ends of a handoff on
one rank each; ``peers`` decides whether the other process lives and what may be posted against its memory; ``messages`` is
what crosses the control channel. Who calls them: the mover (source, sink) and the control thread (peers).
"""
