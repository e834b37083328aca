"""What holds for all unit tests."""

import os

# Numpy reads it when it loads; its threads spin, and small matrices gain nothing by them
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
