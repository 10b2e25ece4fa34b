"""The demos (files whose names begin with a number are run) and the modules they import."""
