"""python -m lab chat: a conversation with a model whose answers are drafted.

Here: turns, the screen, the flags of the chat. Not here: models and drafters.
"""
