"""The ranks that tests of this folder share end with the last of them."""

import worlds


def pytest_runtest_teardown(item, nextitem):
    if nextitem is None or nextitem.path.parent != item.path.parent:
        worlds.close()
