"""Deterministic simulation: many engines in one thread, on one simulated clock, with everything going wrong that can.

The product's own code runs: movers, switchboards, announcers, both ends of every handoff, packed messages, real bytes over the
in-memory twin; in some worlds conversations, too, whose KV prefill takes back from decode. Simulated are time, sockets, devices
and the engines around. A seed decides everything, so that what a seed finds can be seen again; see ``run`` for what is checked.
"""
