"""What is run beside the demos: doctor, the runs on a GPU, writing the notebooks and the README's outputs.

Here: programs that call console and the demos. Not here: what they are built from (support, measure, models).
"""
