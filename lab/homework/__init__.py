"""Tasks to hand in: their texts, each student's own numbers, and the grading.

Here: a folder for each task, and what an instructor grades with. Not here: exact distributions, scripted models
(measure).
Empty until the first task lands: measure/enumeration and measure/scripted are what a grader is built on.
"""
