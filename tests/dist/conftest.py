"""The ranks that tests of one file share end with its last test."""

import worlds


def pytest_runtest_teardown(item, nextitem):
    if nextitem is None or nextitem.path != item.path:
        worlds.close()
