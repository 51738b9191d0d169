"""Objects that live as long as the process, kept out of the garbage collector's way."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def permanent() -> Iterator[None]:
    """What is made inside is never looked at by the collector again.

    A server that is ready holds some 600,000 objects (modules, captured graphs): each full collection would stop every thread for
    a third of a second, and collections while it starts are a third of the start.
    """
    gc.disable()
    try:
        yield
        gc.collect()
        gc.freeze()
    finally:
        gc.enable()
