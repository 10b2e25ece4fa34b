"""The demos, NN_name.py, and the rooms that they import from; each room says in its __init__ what belongs there."""

import os

# Threads that wait for each other should sleep, not spin: beside one busy program, spinning makes a forward of a real
# model many times slower (lab/measure/threads.py). OpenMP reads this once, when torch is loaded, which is always after
# this line.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
