"""One cache partition (a TP group): its page pools, prefix cache and slots, and the seats that use them."""

import heapq
from collections.abc import Iterable, Sequence

from serving.pages import BLOCK_TOKENS, QUANTUM, PagePool, PageTable
from serving.plan import PartitionPlan, ScheduledRequest, SchedulerConfig, Seat, TableUpdates
from serving.prefix_cache import PrefixCache, PrefixHit, extend_digests


class Partition:
    """Seats requests, gives their rows pages and takes pages back. All or nothing: a refusal changes nothing.

    plan: the partition's share of the step being planned; `reserve` and `admit` write table updates there.
    room: tokens that still fit this step's packed prefill, a multiple of the tile.
    """

    def __init__(self, index: int, config: SchedulerConfig) -> None:
        self.index = index
        self.seated = 0
        self._config = config
        self._groups = config.groups
        self._widths = [config.table_width(group) for group in config.groups]
        # Pages per group that one quantum of decoding takes: what every seat must be able to get at any time.
        self._growth = [max(1, QUANTUM // group.page_tokens) for group in config.groups]
        self.pools = [PagePool(config.pages[group.name]) for group in config.groups]
        self._cache = (
            PrefixCache(config.groups, self.pools, config.prefix_replay) if config.enable_prefix_caching else None
        )
        self._slots = list(range(min(config.max_rows_per_partition, config.max_num_seqs)))
        self.begin()

    def begin(self) -> None:
        """Starts the partition's share of a new step."""
        self.plan = PartitionPlan({group.name: TableUpdates() for group in self._groups})
        self.room = self._config.max_tokens_per_partition

    def lookup(self, request: ScheduledRequest) -> PrefixHit:
        """The longest prefix of the request that this partition holds."""
        if self._cache is None:
            return PrefixHit(0, "prefix caching is off")
        return self._cache.lookup(request.digests, request.tokens, request.salt)

    def admit(self, request: ScheduledRequest, hit: int, end: int) -> Seat | None:
        """Seats a request whose first `hit` positions are cached, with pages for positions up to end - 1.

        History is taken for all known tokens at once, so that a prompt once begun is not stopped half way for want of it;
        beyond that one quantum per seat must stay free, or the newcomer would soon be preempted by those before it.
        """
        if not self._slots:
            return None
        known = len(request.tokens)
        cached = self._cache.pages(request.digests, hit) if hit else []
        for pool, (_, pages) in zip(self.pools, cached, strict=False):
            pool.share(pages)
        tables = [
            PageTable(group, pool, width, group.first_live(hit), [])
            for group, pool, width in zip(self._groups, self.pools, self._widths, strict=True)
        ]
        for table, (first, pages) in zip(tables, cached, strict=False):
            table.first, table.pages = first, pages
        fits = all(
            table.missing(end if table.group.window else max(known, end)) + self.seated * growth <= table.pool.available
            for table, growth in zip(tables, self._growth, strict=True)
        )
        if not fits:
            for table in tables:
                table.release_all()
            return None
        seat = Seat(request, self.index, heapq.heappop(self._slots), tables, hit)
        request.seat = seat
        self.seated += 1
        for table in tables:
            self._record(seat, table, table.first, table.pages)
        self._grow(seat, tables[0], max(known, end))
        granted = self.reserve(seat, end)
        assert granted, "pages that were counted as available could not be taken"
        return seat

    def reserve(self, seat: Seat, end: int) -> bool:
        """Makes positions up to end - 1 writable in every group, rounded up to the quantum and cut at the limit."""
        limit = seat.request.limit
        rounded = min(-(-end // QUANTUM) * QUANTUM, limit)
        tables = seat.tables
        for table in tables:
            if table.missing(rounded) > table.pool.available:
                # The last pages are worth having even where a whole quantum is not to be had.
                rounded = min(end, limit)
                if any(t.missing(rounded) > t.pool.available for t in tables):
                    return False
                break
        for table in tables:
            self._grow(seat, table, rounded)
        seat.capacity = rounded if rounded < limit else Seat.FULL
        return True

    def settle(self, seat: Seat) -> None:
        """Publishes the blocks that `seat.confirmed` completes, then gives back what lies behind its windows."""
        confirmed = seat.confirmed
        blocks = confirmed // BLOCK_TOKENS
        if self._cache is not None and seat.published < blocks:
            request = seat.request
            extend_digests(request.digests, request.tokens, blocks, request.salt)
            for block in range(seat.published, blocks):
                self._cache.publish(request.digests, block, seat.tables)
            seat.published = blocks
        for table in seat.tables:
            table.release_behind(confirmed)
        seat.boundary = (confirmed // QUANTUM + 1) * QUANTUM

    def vacate(self, seat: Seat) -> None:
        """Ends a stay. Steps in flight may still write its pages: whoever gets them next runs behind those steps."""
        for table in seat.tables:
            table.release_all()
        heapq.heappush(self._slots, seat.slot)
        self.seated -= 1
        seat.live = False
        seat.request.seat = None

    def forget(self) -> None:
        """Drops the prefix cache's content."""
        for pool in self.pools:
            pool.forget()

    def check(self, seats: Iterable[Seat]) -> None:
        """Raises AssertionError unless the partition's books balance with its live seats."""
        seats = list(seats)
        slots = [seat.slot for seat in seats]
        assert sorted(slots + self._slots) == list(range(len(slots) + len(self._slots))), (
            "a slot is lost or seated twice"
        )
        assert self.seated == len(seats), f"{self.seated} seats counted, {len(seats)} live"
        for index, (group, pool, width) in enumerate(zip(self._groups, self.pools, self._widths, strict=True)):
            pool.check()
            references = [0] * pool.pages
            for seat in seats:
                table = seat.tables[index]
                who = f"{seat.request.request_id}: {group.name}"
                assert len(table.pages) <= width, f"{who} holds {len(table.pages)} pages in {width} columns"
                assert table.first <= group.first_live(seat.confirmed), f"{who} released a page it can still read"
                reserved = (table.first + len(table.pages)) * group.page_tokens
                assert reserved >= min(seat.upper, seat.request.limit), f"{who} plans rows without a page"
                for logical, page in enumerate(table.pages, table.first):
                    references[page] += 1
                    if (logical + 1) * group.page_tokens > seat.confirmed:
                        assert pool.keys[page] is None, f"{who} may write published page {page}"
                        assert pool.references[page] == 1, f"{who} may write shared page {page}"
            assert references == pool.references, f"{group.name}: references differ from the pages that seats hold"

    def _grow(self, seat: Seat, table: PageTable, end: int) -> None:
        count = table.missing(end)
        if count > 0:
            first, pages = table.grow(count)
            self._record(seat, table, first, pages)

    def _record(self, seat: Seat, table: PageTable, first: int, pages: list[int]) -> None:
        updates = self.plan.table_updates[table.group.name]
        updates.slots += [seat.slot] * len(pages)
        updates.columns += [logical % table.width for logical in range(first, first + len(pages))]
        updates.pages += pages


def attempts(partitions: Sequence[Partition], request: ScheduledRequest, turn: int) -> list[tuple[int, str, Partition]]:
    """Where to try to seat a request, best first: cached tokens to start from, the reason for a person, the partition.

    The longest prefix wins, then the fewest requests, then round robin from `turn`. Where a prefix is held but no pages are
    left to use it, starting cold (anywhere, that place included) is better than not starting.
    """
    places = [(partition.lookup(request), partition) for partition in partitions]
    places.sort(key=lambda at: (-at[0].tokens, at[1].seated, (at[1].index - turn) % len(partitions)))
    cold = sorted((at for at in places if at[0].tokens), key=lambda at: at[1].seated)
    return [(hit.tokens, hit.reason, partition) for hit, partition in places] + [
        (0, f"{hit.reason}; started cold for want of pages", partition) for hit, partition in cold
    ]
