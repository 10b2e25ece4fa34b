"""Decoding under load: simulated requests in a batch that changes, and other people's servers, asked and measured.

Here: whatever has more than one request. Not here: one model's loops and speeds (decode_lab, measure).
Empty until the first simulation lands: llm_math's step times are what one is built on.
"""
