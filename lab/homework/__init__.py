"""Tasks to hand in: their texts, each student's own numbers, and the grading.

Here: whatever an instructor hands out or grades with. Not here: exact distributions and scripted models (measure).
Empty until the first task lands: measure/enumeration and measure/scripted are what a grader is built on.
"""
