"""``kvxfer doctor``: what a host has of what kvxfer needs, what it lacks, and how to get it.

    host       what the checks look at, all of it replaceable
    software   Python, packages (and the placeholders that pretend to be some), NIXL, its plugin's libraries
    hardware   kernel, drivers, limits, dma-buf
    fabric     libfabric's providers, and the rails that NIXL would open
    providers  a script that asks libfabric, in a process of its own

Each check is a function of a ``Host`` and returns findings; none changes anything.
"""
