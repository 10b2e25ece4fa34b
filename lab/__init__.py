"""The demos, NN_name.py, and the rooms that they import from; each room says in its __init__ what belongs there."""
