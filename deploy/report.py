"""What the machine says of itself: the live picture, and what is wrong. Nothing is changed.

The words are those of `dsv4 status` and `dsv4 doctor` on the machine.
"""

from pyinfra.api import deploy

from deploy import facts, operations, proof


@deploy("Status")
def status() -> None:
    """Show the live picture; a machine with other tools than ours is left out."""
    if not facts.current().known:
        proof.fail("status")
        return
    operations.told(name="Show the live picture", tool_name="status")


@deploy("Doctor")
def doctor() -> None:
    """Say what is wrong; a machine with other tools than ours is left out."""
    if not facts.current().known:
        proof.fail("doctor")
        return
    operations.told(name="Say what is wrong", tool_name="doctor")
