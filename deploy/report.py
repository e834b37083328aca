"""What the machine says of itself: the live picture, and what is wrong. Nothing is changed.

The words are those of `dsv4 status` and `dsv4 doctor` on the machine. A machine with other tools
than ours is told apart by the same command, and is left out.
"""

from pyinfra.api import deploy

from deploy import operations


@deploy("Status")
def status() -> None:
    """Show the live picture."""
    operations.told(name="Show the live picture", tool_name="status")


@deploy("Doctor")
def doctor() -> None:
    """Say what is wrong."""
    operations.told(name="Say what is wrong", tool_name="doctor")
