"""The proof: a question with a known answer, once for each start of the service."""

from pyinfra.api import deploy

from deploy import operations


@deploy("Verify")
def apply() -> None:
    """Have the running model's answer checked."""
    operations.answer_checked(name="Ask the model")
