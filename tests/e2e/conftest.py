"""The machines the end-to-end tests share; made once, in the order the tests need them."""

import os
import re
from collections.abc import Iterator

import pytest

from tests.e2e.spark import Spark, blank, in_lab


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files in the order of their numbers: each builds on those before it."""

    def place(item: pytest.Item) -> int:
        found = re.match(r"test_(\d+)_", item.path.name)
        return int(found[1]) if found and "e2e" in item.path.parts else 0

    items.sort(key=place)


NAME = os.environ.get("DSV4_E2E_MACHINE", "dsv4-lab-e2e")


@pytest.fixture(scope="session")
def spark() -> Iterator[Spark]:
    """A machine that was blank when the session began; tests run in file order and build on it."""
    machine = blank(NAME)
    yield machine
    in_lab("down", machine.name)


@pytest.fixture(scope="session")
def rough() -> Iterator[Spark]:
    """A second blank machine, for the deploy that is killed again and again."""
    machine = blank(f"{NAME}-rough")
    yield machine
    in_lab("destroy", machine.name)
