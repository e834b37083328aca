"""What deploy says of a release's flags is what the release's own files say."""

import pytest

from deploy import flags
from tests.sources import serve_flags, wheels


def test_the_table_is_what_the_releases_declare() -> None:
    """Made by `python -m tests.sources.serve_flags`."""
    assert serve_flags.table() == flags.TABLE


@pytest.mark.parametrize("release", wheels.RELEASES)
def test_reading_finds_what_everybody_uses(release: str) -> None:
    """Flags of the engine, of the server, and those with a JSON value; none is a stray word."""
    found = serve_flags.of(release)
    assert {"max-model-len", "port", "api-key", "speculative-config", "middleware"} <= found
    assert len(found) > 250
    assert not [flag for flag in found if not flag.replace("-", "").isalnum()]
