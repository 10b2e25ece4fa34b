"""What a cache may forget: which rows of a KV cache stay when a decoder commits (eviction), and rounding of rows.

Here: whatever a decoder may do to its cache at a commit. Not here: the caches themselves (toy/cache, models/cache).
Empty until the first press lands: the protocol's `committed` and the caches' `select` are what one is built on.
"""
