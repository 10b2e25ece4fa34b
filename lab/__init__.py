"""The demos, NN_name.py, and the rooms that they import from; each room says in its __init__ what belongs there."""

import os

# Threads that wait for each other should sleep, not spin: beside one busy program spinning made a forward of a real
# model 5 to 15 times slower than one thread is (lab/measure/threads.py has the readings, and what sleeping costs).
# OpenMP reads this once, when torch is loaded, which every demo does after this line.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
