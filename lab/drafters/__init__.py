"""What proposes tokens: lookups, models, trees, n-gram tiers, cascades, draft heads; and how long a draft should be.

Here: whatever implements decode_lab.Drafter, or decides gamma. Not here: the models that a drafter runs (models, toy).
"""
