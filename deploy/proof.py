"""The proof that what is served works: once for each start of the service, or whenever asked.

The words and the verdicts are those of `dsv4 verify` on the machine.
"""

from pyinfra import context, host, logger
from pyinfra.api import deploy

from deploy import facts, operations, results


@deploy("Verify")
def apply() -> None:
    """Have this start of the service verified."""
    operations.verified(name="Verify what is served", again=False)


@deploy("Verify")
def again() -> None:
    """Verify, whatever was verified before; a machine with other tools than ours is left out."""
    if not facts.current().known:
        fail("verify")
        return
    operations.verified(name="Verify it once more", again=True)


def fail(what: str) -> None:
    """Leave this host out: its tools are none, or of another version of this project."""
    logger.error(f"{host.print_prefix}{what}: {results.NO_TOOLS}")
    context.state.fail_hosts({context.ctx_host.get()})
