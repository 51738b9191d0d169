"""Threads that give way, and those that compute."""

import os
import threading

import pytest

from serving.threads import compute, give_way

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="scheduling policies are Linux's")


def policies() -> list[int]:
    """Of a thread, of one that it starts after giving way, and of one that computes in spite of that."""
    compute()  # whatever the thread that started this one does
    found = [os.sched_getscheduler(0)]
    give_way()

    def child() -> None:
        found.append(os.sched_getscheduler(0))
        compute()
        found.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=child)
    thread.start()
    thread.join()
    return found


def test_threads_that_give_way_and_those_that_compute():
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(policies()))
    thread.start()
    thread.join()
    before, inherited, restored = found
    if inherited == before:
        pytest.skip("this sandbox forbids changes of policy")
    assert (inherited, restored) == (os.SCHED_BATCH, os.SCHED_OTHER)
