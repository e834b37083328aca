"""The locks are what the registry gives today for their pins: nothing more, nothing else.

Versions in a lock are kept, so a newer release is no difference; one that was withdrawn, or whose
files changed, is.
"""

import pytest

from deploy import locks

NAMES = [name for name, lock in locks.known().items() if lock.platform]


@pytest.mark.parametrize("name", NAMES)
def test_a_lock_resolves_to_itself(name: str) -> None:
    """For its own machine and Python, with the hashes as they are served now."""
    lock = locks.known()[name]
    assert locks.resolve(lock) == lock.path("lock").read_text()
