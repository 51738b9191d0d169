"""Start-up without collections, and nothing left to collect afterwards."""

import gc

import pytest

from cli.permanent import permanent


def test_what_is_made_inside_is_frozen() -> None:
    frozen = gc.get_freeze_count()
    try:
        with permanent():
            assert not gc.isenabled()
            kept = [[i] for i in range(1000)]
        assert gc.isenabled() and gc.get_freeze_count() >= frozen + len(kept)
    finally:
        gc.unfreeze()


def test_a_failed_start_turns_the_collector_on_again() -> None:
    with pytest.raises(RuntimeError), permanent():
        raise RuntimeError
    assert gc.isenabled()
