"""The NIXL agent, its in-memory twin, the mover, the control channel, native libraries."""
