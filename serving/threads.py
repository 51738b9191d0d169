"""Which threads give way to which, where Python and the kernels share the cores of a CPU.

A step's threads meet at barriers every few microseconds. If Python wakes up and takes the core of one of them, all wait for it,
so threads that only plan and deliver must not preempt them: they run when a core is free, as one is after every step.
"""

import contextlib
import os


def _use(policy: str) -> None:
    if hasattr(os, policy):  # Linux
        with contextlib.suppress(OSError):  # a sandbox may forbid it: slower, nothing else
            os.sched_setscheduler(0, getattr(os, policy), os.sched_param(0))


def give_way() -> None:
    """From now on this thread, and those it starts, wait for a core instead of preempting whoever computes."""
    _use("SCHED_BATCH")


def compute() -> None:
    """This thread computes: it is not one of those that give way, even if such a one started it."""
    _use("SCHED_OTHER")
