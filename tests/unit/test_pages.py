"""Page groups, pools and tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.pages import QUANTUM, PageGroup, PagePool, PageTable, page_groups

HISTORY, WINDOW, TAIL, OPEN = page_groups(128)


def test_four_groups_and_what_they_keep():
    assert [group.name for group in page_groups(128)] == ["history", "window", "tail", "open"]
    assert not OPEN.shared and HISTORY.window is None
    # 1024 confirmed tokens keep four of 32 window pages, one tail page, and none of the open window.
    assert [group.pages_for(1024) - group.first_live(1024) for group in (WINDOW, TAIL, OPEN)] == [4, 1, 4]
    assert HISTORY.first_live(1024) == 0


@pytest.mark.parametrize("position, first", [(0, 0), (127, 0), (158, 0), (159, 1), (160, 1), (190, 1), (191, 2)])
def test_a_page_lives_while_a_row_can_read_it(position, first):
    """The row at position 159 reads 32 .. 159, so page 0 (0 .. 31) is dead from there on."""
    assert WINDOW.first_live(position) == first


@given(
    group=st.sampled_from([WINDOW, TAIL, OPEN, PageGroup("wide", 32, 300, True)]),
    confirmed=st.integers(0, 3000),
    lag=st.integers(0, QUANTUM - 1),
    unconfirmed=st.integers(1, 600),
)
def test_live_pages_never_share_a_column(group, confirmed, lag, unconfirmed):
    """Release up to a quantum late, reserve up to a quantum ahead: the live logical pages still fit the table."""
    first = group.first_live(max(0, confirmed - lag))
    end = -(-(confirmed + unconfirmed) // QUANTUM) * QUANTUM
    live = range(first, group.pages_for(end))
    width = group.live_pages(1 << 20, unconfirmed)
    assert len(live) <= width
    assert len({logical % width for logical in live}) == len(live)


def test_a_ring_is_no_wider_than_the_longest_request():
    assert WINDOW.live_pages(64, 8192) == 2
    assert HISTORY.live_pages(1 << 20, 8) == 8192


def test_the_null_page_is_never_lent():
    pool = PagePool(5)
    assert sorted(pool.take(4)) == [1, 2, 3, 4]
    assert pool.available == 0
    pool.check()


def test_published_pages_are_evicted_last_and_oldest_first():
    pool = PagePool(5)
    a, b, c, d = pool.take(4)
    pool.publish(a, b"a")
    pool.publish(b, b"b")
    pool.release([b, a, c, d])
    assert pool.available == 4
    assert set(pool.take(2)) == {c, d}
    assert set(pool.page_of) == {b"a", b"b"}
    assert pool.take(1) == [b]
    assert pool.page_of == {b"a": a} and pool.evictions == 1
    pool.check()


def test_sharing_revives_a_cached_page():
    pool = PagePool(3)
    (page,) = pool.take(1)
    pool.publish(page, b"k")
    pool.release([page])
    pool.share([page])
    pool.share([page])
    assert pool.available == 1 and pool.references[page] == 2
    pool.release([page])
    assert pool.available == 1
    pool.release([page])
    assert pool.available == 2 and pool.page_of == {b"k": page}
    pool.check()


def test_the_first_page_of_a_key_stays():
    pool = PagePool(3)
    first, second = pool.take(2)
    pool.publish(first, b"k")
    pool.publish(second, b"k")
    assert pool.page_of == {b"k": first} and pool.keys[second] is None
    pool.release([first, second])
    pool.check()


def test_forget_withdraws_every_key():
    pool = PagePool(4)
    lent, cached = pool.take(2)
    pool.publish(lent, b"lent")
    pool.publish(cached, b"cached")
    pool.release([cached])
    pool.forget()
    assert not pool.page_of and pool.available == 2
    pool.release([lent])
    assert pool.available == 3
    pool.check()


def test_check_names_the_page():
    pool = PagePool(3)
    (page,) = pool.take(1)
    pool.release([page])
    pool.references[page] = 1
    with pytest.raises(AssertionError, match=f"page {page} has 1 references"):
        pool.check()


def test_a_table_slides():
    pool = PagePool(10)
    table = PageTable(TAIL, pool, 4, 0, [])
    assert table.missing(17) == 3
    assert table.grow(3)[0] == 0
    table.release_behind(16)  # rows from 9 on are read: pages 1 and 2 stay
    assert (table.first, len(table.pages)) == (1, 2)
    assert table.grow(2)[0] == 3
    with pytest.raises(AssertionError, match="5 live pages in a table of 4 columns"):
        table.grow(1)
    table.release_all()
    assert pool.available == 9
