"""What console.py is made with: errors, files, text, tables, parsing flags, the record of a run, facts about the host.

Here: whatever knows nothing of decoding, and imports nothing else of the lab. Not here: what a demo calls (console.py).
"""
