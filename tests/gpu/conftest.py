"""What holds for all tests on a GPU; the files themselves run without pytest too."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them, without a word of pytest in them."""
    for item in items:
        item.add_marker(pytest.mark.gpu)
