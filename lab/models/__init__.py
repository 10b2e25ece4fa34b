"""Real models: finding them, loading them, and decoding with them; and models made of others (some layers, rounded).

Here: whatever implements decode_lab.Decoder over another engine. Not here: what proposes tokens (drafters).
"""
