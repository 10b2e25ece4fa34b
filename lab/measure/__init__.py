"""Comparing: methods in turn, timing, prediction beside measurement, exact distributions, divergences, known texts.

Here: whatever a demo measures or checks with. Not here: decoders (models); showing it (console.py, support).
"""
