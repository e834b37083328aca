"""The controller: what decides, over SSH, how a machine has to look.

Some tools of the machine have a pure core that the deploy decides with as well (paths, the memory
equation), so they are importable here under the name they have there.
"""

import sys
from pathlib import Path

_LIB = str(Path(__file__).resolve().parent.parent / "files/opt/dsv4/lib")
if _LIB not in sys.path:
    sys.path.insert(0, _LIB)
