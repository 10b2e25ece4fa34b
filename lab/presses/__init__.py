"""Presses (KV cache compression): which rows of a cache stay when a decoder commits, and rounding of rows.

Here: whatever a decoder may do to its cache at a commit. Not here: the caches themselves (toy/cache, models/cache).
Empty until the first press lands: the protocol's `committed` and the caches' `select` are what one is built on.
"""
