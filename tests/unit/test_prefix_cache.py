"""Content digests, lookups and publication."""

from hashlib import blake2b
from struct import pack

from serving.pages import PagePool, PageTable, page_groups
from serving.prefix_cache import PrefixCache, extend_digests

GROUPS = page_groups(128)


def digests_of(tokens, blocks, salt=b""):
    digests = []
    extend_digests(digests, tokens, blocks, salt)
    return digests


def cache_with(tokens, blocks):
    """A cache in which the first `blocks` blocks of `tokens` are published."""
    pools = [PagePool(100) for _ in GROUPS]
    tables = [
        PageTable(group, pool, 100, 0, pool.take(group.pages_for(len(tokens))))
        for group, pool in zip(GROUPS, pools, strict=True)
    ]
    cache = PrefixCache(GROUPS, pools, 1)
    for block in range(blocks):
        cache.publish(digests_of(tokens, blocks), block, tables)
    return cache, pools, tables


def test_digests_chain():
    tokens = list(range(512))
    whole = digests_of(tokens, 4)
    assert len(set(whole)) == 4 and all(len(digest) == 16 for digest in whole)
    grown = []
    for blocks in (1, 2, 4):
        extend_digests(grown, tokens, blocks, b"")
    assert grown == whole
    other = [1, *tokens[1:]]
    assert not set(digests_of(other, 4)) & set(whole), "a change at the start must change every later block"
    assert not set(digests_of(tokens, 4, b"salt")) & set(whole)


def test_digests_are_of_content():
    """Token bytes under a cryptographic hash, never Python's `hash`: nothing depends on the process or on luck."""
    root = blake2b(b"tenant", digest_size=16).digest()
    first = blake2b(root + pack("=128I", *range(128)), digest_size=16).digest()
    second = blake2b(first + pack("=128I", *range(128, 256)), digest_size=16).digest()
    assert digests_of(list(range(256)), 2, b"tenant") == [first, second]


def test_only_what_a_continuation_reads_is_published():
    _, pools, _ = cache_with(list(range(300)), 2)
    assert [len(pool.page_of) for pool in pools] == [2, 8, 2, 0]


def test_a_hit_names_its_pages():
    tokens = list(range(300))
    cache, _, tables = cache_with(tokens, 2)
    digests = []
    hit = cache.lookup(digests, tokens, b"")
    assert hit.tokens == 256 and len(digests) == 2
    assert cache.pages(digests, 256) == [
        (0, tables[0].pages[:2]),
        (4, tables[1].pages[4:8]),
        (31, tables[2].pages[31:32]),
    ]


def test_a_lost_page_shortens_the_hit():
    tokens = list(range(300))
    cache, pools, tables = cache_with(tokens, 2)
    victim = tables[1].pages[6]
    del pools[1].page_of[pools[1].keys[victim]]
    assert cache.lookup([], tokens, b"") == (
        128,
        "hit 128 of 300 tokens: history matches 256 tokens but window pages behind it were evicted",
    )
    victim = tables[2].pages[15]
    del pools[2].page_of[pools[2].keys[victim]]
    hit = cache.lookup([], tokens, b"")
    assert hit.tokens == 0 and hit.reason.startswith("miss of 300 tokens: history matches 256 tokens")


def test_a_miss_hashes_one_block_only():
    cache, _, _ = cache_with(list(range(300)), 2)
    digests = []
    assert cache.lookup(digests, [9] * 100_000, b"").tokens == 0
    assert len(digests) == 1
