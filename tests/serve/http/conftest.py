"""One server for all tests that leave it as it was."""

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.serve.http.running import Running

# The GPU lane runs where the server's packages may be missing.
collect_ignore_glob = [] if importlib.util.find_spec("uvicorn") else ["test_*.py"]


@pytest.fixture(scope="session")
def shared() -> "Iterator[Running]":
    from tests.serve.http.running import running

    with running() as server:
        yield server


@pytest.fixture
def server(shared: "Running") -> "Iterator[Running]":
    """The shared server; afterwards nothing is open and every page is free."""
    yield shared
    shared.assert_at_rest()
