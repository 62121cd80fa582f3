"""A rank's cache as arrays in memory; two of them make descriptor arrays.

``maps`` says where everything of a cache lies, ``check`` whether a received map can be, ``describe`` makes maps of tensors.
``ranks`` says who sends what to whom. ``refine`` finds the common pieces of two maps, ``positions`` which stretches of which
blocks move, ``runs`` joins what touches, and ``plan`` puts the three together; ``repack`` is for what has no useful common runs.
``card`` is what a rank tells a peer about itself and decides whether the two may exchange KV at all. ``blocks`` plans copies of
opaque blocks between two caches of one geometry, and is what the mover still uses.

Nothing here does I/O. See docs/layout.md.
"""
