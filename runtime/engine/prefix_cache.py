"""Pages of computed tokens, kept for later sequences that begin with the same ones.

A tree of whole pages: below each page, those that followed it, by the token ids in them. Tokens are compared exactly.
Only page ids are kept; nothing on the device moves. Least recently used pages go first, and never before what follows
them. What happens depends on the calls alone, so runs repeat.

Where sequences have states beside their pages (`states`), a prefix ends where somebody has kept one: `keep_state` lays
a copy of a sequence's state by the page that its tokens end with. It goes with that page, or when another is to be kept
and none was used longer ago.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cheetah.errors import CheetahError
from cheetah.runtime.engine.kv_cache import PagePool

PageTokens = tuple[int, ...]


@dataclass(eq=False)
class _Node:
    """One cached page. followers: the cached pages after it, by their tokens. above: where it is a follower. state:
    what is remembered of all tokens up to its end, if that is kept."""

    page: int
    tokens: PageTokens
    above: dict[PageTokens, _Node]
    followers: dict[PageTokens, _Node] = field(default_factory=dict)
    state: int | None = None


class PrefixCache:
    """Holds up to `capacity` pages of `pool` (None: as many as there are), one reference each.

    It gives them up when the pool has no others. hits: lookups that found pages; misses: lookups that found none;
    evicted: pages that went for lack of room.
    """

    def __init__(self, pool: PagePool, page_size: int, capacity: int | None = None):
        if pool.cache is not None:
            raise CheetahError("the KV pool has a prefix cache already: use that one")
        if capacity is not None and capacity < 0:
            raise CheetahError(f"the prefix cache cannot hold {capacity} pages: give 0 or more, or None for no limit")
        pool.cache = self
        self._pool = pool
        self.page_size = page_size
        self.capacity = pool.pages if capacity is None else capacity
        self.hits = self.misses = self.evicted = 0
        self._root: dict[PageTokens, _Node] = {}
        # By page, least recently used first. Whoever uses a page has used all before it, and those are moved after it:
        # so every page comes before the page that it follows, and going through in order meets leaves first.
        self._nodes: OrderedDict[int, _Node] = OrderedDict()
        self._with_states: OrderedDict[int, _Node] = OrderedDict()  # by state, least recently used first

    def __len__(self) -> int:
        """How many pages it holds."""
        return len(self._nodes)

    def __contains__(self, page: object) -> bool:
        return page in self._nodes

    def lookup(self, token_ids: Sequence[int]) -> tuple[list[int], int]:
        """(pages, tokens): the longest cached prefix of `token_ids` in whole pages, and how many tokens that is; where
        there are states, of those at whose end one is kept, see `state_behind`.

        At least one token is left over: a launch needs one to compute. Nothing is held for the caller: have a sequence
        `adopt` the pages before anything else is taken from the pool.
        """
        nodes = self._usable(token_ids)
        self._use(nodes)
        if nodes and nodes[-1].state is not None:
            self._with_states.move_to_end(nodes[-1].state)
        self.hits, self.misses = self.hits + bool(nodes), self.misses + (not nodes)
        return [node.page for node in nodes], len(nodes) * self.page_size

    def known(self, token_ids: Sequence[int]) -> int:
        """How many tokens `lookup` would give: for who only wonders."""
        return len(self._usable(token_ids)) * self.page_size

    def state_behind(self, pages: Sequence[int]) -> int | None:
        """The state that is kept at the end of pages that `lookup` gave."""
        return self._nodes[pages[-1]].state if pages else None

    def parting(self, token_ids: Sequence[int]) -> int:
        """Behind how many tokens these part from others whose pages are cached, which go on there; 0 if they do not, or
        in their first page."""
        nodes = self._matching(token_ids)
        return len(nodes) * self.page_size if nodes and nodes[-1].followers else 0

    def keep_state(self, token_ids: Sequence[int], state: int) -> None:
        """Keeps a copy of a state, which is of just these tokens: whole pages, all of them cached. Nothing where there
        is one."""
        nodes, states = self._walk(self._split(token_ids, len(token_ids) // self.page_size)), self._pool.states
        if not nodes or len(nodes) * self.page_size != len(token_ids) or nodes[-1].state is not None or not states.kept:
            return
        if len(self._with_states) == states.kept:
            self._forget_state(next(iter(self._with_states.values())))
        nodes[-1].state = kept = states.take()
        self._with_states[kept] = nodes[-1]
        states.note_copy(state, kept)

    def insert(self, token_ids: Sequence[int], pages: Sequence[int]) -> int:
        """Keeps the whole pages of a sequence that begins with `token_ids`, all of them computed; gives how many are
        new.

        pages: the sequence's, held by the caller; `token_ids`: those in the cache, e.g. `ids[:sequence.length]`. Where
        other pages with the same tokens are cached, those stay. At capacity other pages make room, least recently used
        first; what then does not fit is not kept. CheetahError, with nothing changed, for too few pages and for pages
        that hold other cached tokens or that nobody holds.
        """
        split = self._split(token_ids, len(token_ids) // self.page_size)
        if len(pages) < len(split):
            raise CheetahError(f"{len(token_ids)} tokens fill {len(split)} pages, but {len(pages)} pages are given")
        known = self._walk(split)
        new = list(zip(split, pages, strict=False))[len(known) :]
        self._hold(page for _, page in new)
        self._use(known)
        room = self._make_room(len(new), kept=len(known))
        self._pool.give_back(page for _, page in new[room:])
        self._append(known, new[:room])
        return len(new[:room])

    def clear(self) -> None:
        """Gives all pages back."""
        for node in [*self._with_states.values()]:
            self._forget_state(node)
        self._pool.give_back(self._nodes)
        self._root.clear()
        self._nodes.clear()

    # What the pool asks -----------------------------------------------------------------------------------------------

    def pages_held_alone(self) -> int:
        """How many pages nobody else holds."""
        return sum(map(self._is_held_alone, self._nodes))

    def evict(self, count: int) -> int:
        """Frees `count` pages that nobody else holds, or all there are; says how many.

        Least recently used leaves first. A page may have followers that others hold, if those computed its tokens once
        more: when no such leaf is left, they are given up with it.
        """
        free_before = self._pool.free_pages
        for follow in (False, True):
            for node in list(self._nodes.values()):
                if self._pool.free_pages - free_before >= count:
                    break
                if node.page in self._nodes and self._is_held_alone(node.page) and (follow or not node.followers):
                    self.evicted += self._drop(node)
        return self._pool.free_pages - free_before

    def forget(self, page: int) -> None:
        """Gives this page up with all that follow it, whoever else holds them; nothing if it is not cached."""
        if page in self._nodes:
            self.evicted += self._drop(self._nodes[page])

    def _is_held_alone(self, page: int) -> bool:
        return self._pool.count(page) == 1

    # The tree ---------------------------------------------------------------------------------------------------------

    def _split(self, token_ids: Sequence[int], pages: int) -> list[PageTokens]:
        """The tokens of the first `pages` pages."""
        tokens = [int(token) for token in token_ids[: pages * self.page_size]]
        return [tuple(tokens[start : start + self.page_size]) for start in range(0, len(tokens), self.page_size)]

    def _walk(self, split: Iterable[PageTokens]) -> list[_Node]:
        """The cached pages of these tokens, from the first on, as far as there are any."""
        nodes: list[_Node] = []
        followers = self._root
        for tokens in split:
            node = followers.get(tokens)
            if node is None:
                break
            nodes.append(node)
            followers = node.followers
        return nodes

    def _matching(self, token_ids: Sequence[int]) -> list[_Node]:
        """The cached pages of these tokens, but for the last token."""
        return self._walk(self._split(token_ids, (len(token_ids) - 1) // self.page_size))

    def _usable(self, token_ids: Sequence[int]) -> list[_Node]:
        """Of those, as many as a sequence may begin with."""
        nodes = self._matching(token_ids)
        while self._pool.states.count and nodes and nodes[-1].state is None:
            nodes.pop()
        return nodes

    def _use(self, nodes: Sequence[_Node]) -> None:
        """Makes a path from the root the most recently used, its first page most of all."""
        for node in reversed(nodes):
            self._nodes.move_to_end(node.page)

    def _hold(self, pages: Iterable[int]) -> None:
        """Takes references to pages that are not cached yet, all or none."""
        pages = list(pages)
        for page, times in Counter(pages).items():
            if page in self._nodes or times > 1:
                raise CheetahError(f"page {page} holds other cached tokens: insert each page with its own tokens")
        self._pool.share(pages)

    def _make_room(self, count: int, kept: int) -> int:
        """Drops old pages, but not the `kept` newest, so that `count` more fit; gives how many do."""
        excess = len(self._nodes) + count - self.capacity
        for node in list(self._nodes.values())[: max(0, min(excess, len(self._nodes) - kept))]:
            self.evicted += self._drop(node)
        return min(count, max(0, self.capacity - len(self._nodes)))

    def _append(self, path: list[_Node], new: Iterable[tuple[PageTokens, int]]) -> None:
        """Adds pages, already held, below the last of `path`."""
        path = list(path)
        for tokens, page in new:
            above = path[-1].followers if path else self._root
            above[tokens] = self._nodes[page] = node = _Node(page, tokens, above)
            path.append(node)
        self._use(path)

    def _drop(self, node: _Node) -> int:
        """Gives a page and all that follow it back; how many."""
        del node.above[node.tokens]
        dropped, rest = [], [node]
        while rest:
            last = rest.pop()
            dropped.append(last.page)
            rest += last.followers.values()
        for page in dropped:
            self._forget_state(self._nodes.pop(page))
        self._pool.give_back(dropped)
        return len(dropped)

    def _forget_state(self, node: _Node) -> None:
        if node.state is not None:
            del self._with_states[node.state]
            self._pool.states.give_back(node.state)
            node.state = None
