"""How many inputs each test draws: KVFOLD_INPUTS in all, or 600, rounded up; and how many there were.

Not in ``conftest.py``, which pytest imports by a name of its own: tests would count in another module.
"""

import os

INPUTS = int(os.environ.get("KVFOLD_INPUTS", "600"))
TESTS = 11  # that share the inputs
drawn = {"inputs": 0, "refused": 0}
