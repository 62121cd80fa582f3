"""A cache as a strided index space; two of them make descriptor arrays."""
