"""A rank's cache as arrays of blocks in memory; two of them make descriptor arrays.

``blocks`` describes a cache and plans copies between two of them, ``card`` is what a rank tells a peer about itself and
decides whether the two may exchange KV at all. Nothing here does I/O.
"""
