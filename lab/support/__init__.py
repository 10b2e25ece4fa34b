"""What console, the notebooks, the README's outputs and the GPU records are made with.

Here: whatever knows nothing of decoding. Not here: what a demo calls (console).
"""
