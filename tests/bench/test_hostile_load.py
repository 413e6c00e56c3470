"""The load test: ten honest clients keep their latencies beside each hostile set."""

import asyncio

import pytest

from bench.serve.hostile_load import ATTACKS, run, tiny_server
from tests.quiet import cores_alone


@pytest.mark.slow(first=True)
@pytest.mark.timeout(600)
def test_honest_clients_beside_hostile_ones() -> None:
    with cores_alone(), tiny_server() as url:
        assert asyncio.run(run(url, 4.0, [*ATTACKS])) == 0
