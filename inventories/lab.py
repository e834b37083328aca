"""The lab's machines, as `tests/lab.sh` keeps them: nothing here to edit.

`DSV4_LAB_MACHINES=NAME[,NAME]` picks some; without it, every machine of the lab is a host. Data
that is the same on all of them lies in `group_data/lab.py`.
"""

import os

from tests.lab import state

lab = state.hosts(state.read(), os.environ.get("DSV4_LAB_MACHINES"))
