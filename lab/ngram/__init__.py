"""N-gram tables on disk: the file format, counting, reading a corpus, and the command line.

Here: whatever reads or writes tables. Not here: the drafter that uses them (drafters/tiers).
"""
