"""One server for all tests that leave it as it was."""

from collections.abc import Iterator

import pytest

from tests.serve.http.running import Running, running


@pytest.fixture(scope="session")
def shared() -> Iterator[Running]:
    with running() as server:
        yield server


@pytest.fixture
def server(shared: Running) -> Iterator[Running]:
    """The shared server; afterwards nothing is open and every page is free."""
    yield shared
    shared.assert_at_rest()
