"""Cache pages as integers: the four page groups, the pool that lends pages, and one request's table of them.

Eight cache families live on the device (seven of the target, and the drafter's context). Families that keep rows for the
same window and are shared under the same rule move in lockstep, so they share page ids; four groups remain, each with its
own id space and one table per request:

    group     page    window           shared   families
    history   128     none, all kept   yes      CSA entries, HCA entries, index keys and their scales
    window     32     sliding window   yes      raw kv of all layers, drafter context
    tail        8     8                yes      CSA compressor rows, index compressor rows
    open       32     128              no       HCA compressor rows

`open` is never shared: prefix hits end on multiples of 128 tokens, where the open HCA window is empty and needs no rows.
Page 0 of every group is the null page: padding rows write there and it is never lent.

Table columns. A logical page (position // page_tokens) sits in column `logical % width`. History has a column per page of
the longest request. A ring must hold every logical page that is live at once, which are those touching

    [confirmed - (window - 1), capacity)

`confirmed` may trail the last release by QUANTUM - 1 positions (releases are batched), `capacity` may lead the last planned
row by QUANTUM - 1 (reservations are rounded up), and up to `pipeline_depth` steps of `step_tokens` positions each lie
between the two. A span of S positions touches at most ceil((S - 1) / page) + 1 pages, whatever its alignment.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

NULL_PAGE = 0
QUANTUM = 32  # tokens: reservations and releases happen once per so many positions, so a usual step does neither
BLOCK_TOKENS = 128  # the unit of prefix caching: least common multiple of all page sizes and of the HCA ratio


@dataclass(frozen=True)
class PageGroup:
    """Cache families that share page ids.

    window: how many positions, the newest included, a row can look back; None keeps every page.
    shared: whether full pages are published to the prefix cache.
    """

    name: str
    page_tokens: int
    window: int | None
    shared: bool

    def pages_for(self, tokens: int) -> int:
        """Logical pages that cover positions 0 .. tokens - 1."""
        return -(-tokens // self.page_tokens)

    def first_live(self, position: int) -> int:
        """First logical page that a row at `position`, or any later one, can still read."""
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // self.page_tokens

    def live_pages(self, max_model_len: int, unconfirmed_tokens: int) -> int:
        """Most logical pages a request holds at once with so many planned, unconfirmed positions (module docstring)."""
        whole = self.pages_for(max_model_len)
        if self.window is None:
            return whole
        span = (self.window - 1) + unconfirmed_tokens + 2 * (QUANTUM - 1)
        return min(whole, -(-(span - 1) // self.page_tokens) + 1)


def page_groups(sliding_window: int) -> tuple[PageGroup, ...]:
    """The four groups of a model with this raw-kv window, history first."""
    return (
        PageGroup("history", 128, None, True),
        PageGroup("window", 32, sliding_window, True),
        PageGroup("tail", 8, 8, True),
        PageGroup("open", 32, 128, False),
    )


class PagePool:
    """Physical pages 1 .. pages - 1 of one group in one partition, with reference counts and published keys.

    A page is lent (references > 0), free, or cached: free to take but still holding published content. Unpublished pages
    are lent first, then cached ones in the order of their release. O(1) per page.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.references = [0] * pages
        self.keys: list[bytes | None] = [None] * pages
        self.page_of: dict[bytes, int] = {}
        self.free = list(range(pages - 1, NULL_PAGE, -1))
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.evictions = 0

    @property
    def available(self) -> int:
        """Pages that `take` could lend now."""
        return len(self.free) + len(self.cached)

    def take(self, count: int) -> list[int]:
        """Lends `count` pages, each with one reference; the caller has checked `available`."""
        free = self.free
        while len(free) < count:
            free.append(self._evict())
        taken = free[-count:] if count else []
        del free[len(free) - count :]
        references = self.references
        for page in taken:
            references[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Adds a reference to published pages, lent or cached."""
        for page in pages:
            if not self.references[page]:
                del self.cached[page]
            self.references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drops one reference from each page, in the order in which they should be evicted."""
        references, keys = self.references, self.keys
        for page in pages:
            references[page] -= 1
            if references[page] == 0:
                if keys[page] is None:
                    self.free.append(page)
                else:
                    self.cached[page] = None

    def publish(self, page: int, key: bytes) -> None:
        """Names a lent page by its content. The first page of a key stays; a page is never renamed."""
        if key not in self.page_of:
            self.page_of[key] = page
            self.keys[page] = key

    def forget(self) -> None:
        """Withdraws every published key; lent pages stay lent."""
        self.page_of.clear()
        self.keys = [None] * self.pages
        self.free.extend(self.cached)
        self.cached.clear()

    def _evict(self) -> int:
        page, _ = self.cached.popitem(last=False)
        key = self.keys[page]
        self.keys[page] = None
        del self.page_of[key]
        self.evictions += 1
        return page

    def check(self) -> None:
        """Raises AssertionError naming the first page whose state contradicts itself."""
        free, cached = set(self.free), set(self.cached)
        assert len(free) == len(self.free), "a page is on the free list twice"
        assert not free & cached, f"pages {free & cached} are both free and cached"
        assert NULL_PAGE not in free | cached, "the null page was released"
        assert self.references[NULL_PAGE] == 0 and self.keys[NULL_PAGE] is None, "the null page was lent or published"
        for page in range(1, self.pages):
            references, key = self.references[page], self.keys[page]
            idle = page in free or page in cached
            assert references >= 0, f"page {page} was released more often than lent"
            assert idle == (references == 0), (
                f"page {page} has {references} references and is {'' if idle else 'not '}idle"
            )
            assert page not in free or key is None, f"free page {page} is still published"
            assert page not in cached or key is not None, f"cached page {page} has no key"
            assert key is None or self.page_of.get(key) == page, f"page {page} and the index disagree about its key"
        assert len(self.page_of) == sum(key is not None for key in self.keys), "the index names a page without a key"


class PageTable:
    """One request's live logical pages in one group: `pages[i]` backs logical page `first + i`."""

    __slots__ = ("first", "group", "pages", "pool", "width")

    def __init__(self, group: PageGroup, pool: PagePool, width: int, first: int, pages: list[int]) -> None:
        self.group = group
        self.pool = pool
        self.width = width
        self.first = first
        self.pages = pages

    def missing(self, end: int) -> int:
        """Pages still to be taken before position end - 1 may be written."""
        return -(-end // self.group.page_tokens) - self.first - len(self.pages)

    def grow(self, count: int) -> tuple[int, list[int]]:
        """Takes `count` pages; returns the first one's logical index and their ids."""
        start = self.first + len(self.pages)
        taken = self.pool.take(count)
        self.pages += taken
        assert len(self.pages) <= self.width, (
            f"{self.group.name}: {len(self.pages)} live pages in a table of {self.width} columns"
        )
        return start, taken

    def release_behind(self, position: int) -> None:
        """Gives back the pages that no row at `position` or later can read."""
        count = self.group.first_live(position) - self.first
        if count > 0:
            self.pool.release(self.pages[:count])
            del self.pages[:count]
            self.first += count

    def release_all(self) -> None:
        """Gives back everything, newest first: a prefix is only of use with all that precedes it, so it must go last."""
        self.pool.release(reversed(self.pages))
        self.pages = []
