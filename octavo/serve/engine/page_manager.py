"""Pages of the KV cache: reference counts, the prefix cache, and eviction. Pure Python; the scheduler calls it.

A full page's hash covers its tokens, everything before them, and a salt (weight version, numerics, model), so a hit
can only be a page whose bytes the same weights computed from the same tokens.
"""

import dataclasses
import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable

from octavo.serve.engine.sequence import Sequence


@dataclasses.dataclass(slots=True)
class Page:
    """One page; `prefix_hash` and `token_ids` are set while it is in the prefix cache."""

    num_refs: int = 0
    prefix_hash: bytes | None = None
    token_ids: tuple[int, ...] = ()


class PageManager:
    """Hands out pages and finds those that already hold a sequence's beginning.

    Args:
        num_pages: pages of the cache.
        page_size: tokens a page.
        salt: what else a cached page depends on; see salted_by.
        enable_prefix_caching: keep full pages findable by their content.
    """

    def __init__(self, num_pages: int, page_size: int, salt: str = "", enable_prefix_caching: bool = True) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        self._pages = [Page() for _ in range(num_pages)]
        # next to be taken first: never-cached ones, then the least recently used
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        self._cached: dict[bytes, int] = {}
        self._root = b""
        self.reset_prefix_cache(salt)

    @property
    def num_free_pages(self) -> int:
        """Pages without a reference, cached ones included."""
        return len(self._free)

    @property
    def num_used_pages(self) -> int:
        return self.num_pages - len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self, seq: Sequence) -> int | None:
        """Give a new sequence pages for all its tokens, shared ones for a cached prefix.

        Returns:
            The number of tokens that the shared pages hold (at least one token is left to compute), or None if there
            are too few pages; then nothing has changed.
        """
        shared = self._match_prefix(seq)
        num_revived = sum(self._pages[page_id].num_refs == 0 for page_id in shared)
        num_fresh = self.pages_for(seq.num_tokens) - len(shared)
        if num_fresh > self.num_free_pages - num_revived:
            return None
        for page_id in shared:
            self._acquire(page_id)
        seq.page_table = shared + [self._take() for _ in range(num_fresh)]
        return len(shared) * self.page_size

    def grow(self, seq: Sequence) -> bool:
        """Add the pages that its newest tokens need; False if there are too few, and nothing has changed."""
        missing = self.pages_for(seq.num_tokens_ahead) - len(seq.page_table)
        if missing > self.num_free_pages:
            return False
        seq.page_table += [self._take() for _ in range(missing)]
        return True

    def cache_full_pages(self, seq: Sequence, start: int, end: int) -> None:
        """Make the pages that the tokens [start, end) fill findable; the step under way writes them.

        A sequence scheduled later in the same step may share them: each layer writes all keys before it reads any.
        """
        if not self.enable_prefix_caching:
            return
        for index in range(start // self.page_size, end // self.page_size):
            prefix_hash, page_id = self._hash(seq, index), seq.page_table[index]
            if prefix_hash not in self._cached and self._pages[page_id].prefix_hash is None:
                self._cached[prefix_hash] = page_id
                self._pages[page_id].prefix_hash = prefix_hash
                self._pages[page_id].token_ids = self._tokens(seq, index)

    def free(self, seq: Sequence) -> None:
        """Take a sequence's pages back; cached ones stay findable until they are needed for something else."""
        # the last page first: a prefix outlives what follows it
        for page_id in reversed(seq.page_table):
            page = self._pages[page_id]
            page.num_refs -= 1
            if page.num_refs == 0:
                self._free[page_id] = None
                if page.prefix_hash is None:
                    self._free.move_to_end(page_id, last=False)
        seq.page_table = []

    def reset_prefix_cache(self, salt: str) -> None:
        """Forget all cached pages and salt those to come. No sequence may hold pages.

        Args:
            salt: text that differs whenever the bytes of a page with the same tokens may differ.
        """
        assert self.num_used_pages == 0, f"{self.num_used_pages} pages are in use"
        self.forget_cached_pages()
        self._root = hashlib.blake2b(salt.encode(), digest_size=16).digest()

    def forget_cached_pages(self) -> None:
        """Make every page that is cached now unfindable; those that sequences hold stay theirs."""
        for page_id in self._cached.values():
            self._pages[page_id].prefix_hash, self._pages[page_id].token_ids = None, ()
        self._cached.clear()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Assert that counts, free pages and cache agree with the page tables of all living sequences."""
        refs = Counter(page_id for seq in sequences for page_id in seq.page_table)
        for page_id, page in enumerate(self._pages):
            assert page.num_refs == refs[page_id], f"page {page_id}: {page.num_refs} counted, {refs[page_id]} held"
            assert (page_id in self._free) == (page.num_refs == 0), f"page {page_id}: free and held disagree"
            assert (page.prefix_hash is None) == (page.token_ids == ()), f"page {page_id}: half cached"
        hashes = {page.prefix_hash: i for i, page in enumerate(self._pages) if page.prefix_hash is not None}
        assert hashes == self._cached, "the prefix cache and its pages disagree"
        for seq in sequences:
            assert len(set(seq.page_table)) == len(seq.page_table), f"a page comes twice in {seq.page_table}"

    def _match_prefix(self, seq: Sequence) -> list[int]:
        """Pages of the longest cached prefix that leaves a token to compute."""
        found: list[int] = []
        if not self.enable_prefix_caching or seq.scores_prompt:
            return found
        for index in range((seq.num_tokens - 1) // self.page_size):
            page_id = self._cached.get(self._hash(seq, index))
            if page_id is None or self._pages[page_id].token_ids != self._tokens(seq, index):
                break
            found.append(page_id)
        return found

    def _hash(self, seq: Sequence, index: int) -> bytes:
        """Hash of the sequence's first index + 1 pages of tokens."""
        while len(seq.page_hashes) <= index:
            parent = seq.page_hashes[-1] if seq.page_hashes else self._root
            tokens = array("q", self._tokens(seq, len(seq.page_hashes))).tobytes()
            seq.page_hashes.append(hashlib.blake2b(parent + tokens, digest_size=16).digest())
        return seq.page_hashes[index]

    def _tokens(self, seq: Sequence, index: int) -> tuple[int, ...]:
        return tuple(seq.token_ids[index * self.page_size : (index + 1) * self.page_size])

    def _acquire(self, page_id: int) -> None:
        if self._pages[page_id].num_refs == 0:
            del self._free[page_id]
        self._pages[page_id].num_refs += 1

    def _take(self) -> int:
        """A page for new content; what it held is forgotten."""
        page_id, _ = self._free.popitem(last=False)
        page = self._pages[page_id]
        if page.prefix_hash is not None:
            del self._cached[page.prefix_hash]
            page.prefix_hash, page.token_ids = None, ()
        page.num_refs = 1
        return page_id
