"""Pytest's plugin that keeps every test and about a sixth of each one's cases, always the same ones."""

import zlib

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seen: set[str] = set()
    kept, dropped = [], []
    for item in items:
        test, _, case = item.nodeid.partition("[")
        is_kept = test not in seen or zlib.crc32(case.encode()) % 6 == 0  # no stride of the parameters' own
        seen.add(test)
        (kept if is_kept else dropped).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)
