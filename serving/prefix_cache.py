"""Prefix cache of one partition: which pages hold the rows of which tokens, by content.

Tokens are cut in blocks of 128. A block's digest covers its own tokens and, through its parent's digest, everything before
it and the salt, so equal digests mean equal prefixes. Confirmed full blocks are published: the history page, and those
window and tail pages that a request continuing at the block's end could read. A request may start after block h if

    history holds blocks 0 .. h-1,   window and tail hold the pages their windows reach back to from 128 h

and each group may have lost pages on its own, so a shorter boundary is tried until all agree.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from serving.pages import BLOCK_TOKENS, PageGroup, PagePool, PageTable

DIGEST_BYTES = 16


def extend_digests(digests: list[bytes], tokens: Sequence[int], blocks: int, salt: bytes) -> None:
    """Appends digests until `digests` covers the first `blocks` full blocks of `tokens`."""
    parent = digests[-1] if digests else blake2b(salt, digest_size=DIGEST_BYTES).digest()
    for block in range(len(digests), blocks):
        content = array("I", tokens[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]).tobytes()
        parent = blake2b(parent + content, digest_size=DIGEST_BYTES).digest()
        digests.append(parent)


class PrefixHit(NamedTuple):
    """Where a request may start: `tokens` positions are already computed (a multiple of 128, 0 for a miss).

    reason: one line for a person: what matched and what stopped it.
    """

    tokens: int
    reason: str


class PrefixCache:
    """Lookup and publication over the pools of one partition; it owns no pages.

    replay: tokens at the end of what is known that are always computed again, at least 1.
    """

    def __init__(self, groups: Sequence[PageGroup], pools: Sequence[PagePool], replay: int) -> None:
        self._shared = [(g, p) for g, p in zip(groups, pools, strict=True) if g.shared]
        self._history = next(pool for group, pool in self._shared if group.window is None)
        self._rings = [(group, pool) for group, pool in self._shared if group.window is not None]
        self._replay = max(1, replay)

    def lookup(self, digests: list[bytes], tokens: Sequence[int], salt: bytes) -> PrefixHit:
        """The longest usable prefix of `tokens`; hashes no further than the first block that is not cached."""
        known = len(tokens)
        most = max(0, known - self._replay) // BLOCK_TOKENS
        if not most:
            return PrefixHit(0, f"miss: {known} tokens, a hit needs at least {BLOCK_TOKENS + self._replay}")
        matched = 0
        while matched < most:
            extend_digests(digests, tokens, matched + 1, salt)
            if digests[matched] not in self._history.page_of:
                break
            matched += 1
        stop = f"tokens {matched * BLOCK_TOKENS} to {(matched + 1) * BLOCK_TOKENS - 1} are not in the history"
        lost = ""
        for blocks in range(matched, 0, -1):
            lacking = self._lacking(digests, blocks)
            if lacking is None:
                hit = blocks * BLOCK_TOKENS
                why = lost or (stop if matched < most else f"all that {known} tokens allow")
                return PrefixHit(hit, f"hit {hit} of {known} tokens: {why}")
            lost = lost or f"history matches {matched * BLOCK_TOKENS} tokens but {lacking} pages behind it were evicted"
        return PrefixHit(0, f"miss of {known} tokens: {lost or stop}")

    def pages(self, digests: list[bytes], tokens: int) -> list[tuple[int, list[int]]]:
        """Per group (shared ones only, in order): first logical page and page ids that a hit of `tokens` positions needs."""
        return [
            (first, [pool.page_of[key] for key in keys])
            for group, pool in self._shared
            for first, keys in [_needed(group, digests, tokens)]
        ]

    def publish(self, digests: list[bytes], block: int, tables: Sequence[PageTable]) -> None:
        """Publishes the pages of a confirmed block that `tables` (one per group) still hold."""
        end = (block + 1) * BLOCK_TOKENS
        for table in tables:
            group = table.group
            if group.shared:
                per_block = BLOCK_TOKENS // group.page_tokens
                first = max(block * per_block, group.first_live(end)) if group.window else block
                for logical in range(first, end // group.page_tokens):
                    table.pool.publish(
                        table.pages[logical - table.first], _key(digests[block], logical - block * per_block)
                    )

    def _lacking(self, digests: list[bytes], blocks: int) -> str | None:
        """Name of the first ring group that cannot continue after `blocks` blocks, or None."""
        for group, pool in self._rings:
            if any(key not in pool.page_of for key in _needed(group, digests, blocks * BLOCK_TOKENS)[1]):
                return group.name
        return None


def _needed(group: PageGroup, digests: list[bytes], tokens: int) -> tuple[int, list[bytes]]:
    """First logical page that a row at position `tokens` reads, and the keys from there up to that position."""
    per_block = BLOCK_TOKENS // group.page_tokens
    first = group.first_live(tokens)
    logical = range(first, tokens // group.page_tokens)
    return first, [_key(digests[i // per_block], i % per_block) for i in logical]


def _key(digest: bytes, index: int) -> bytes:
    """Names page `index` of a block; history has one page per block and uses the digest itself."""
    return digest if index == 0 else digest + bytes([index])
