"""Bugs planted in passes over prompts."""

from __future__ import annotations

from tests.program.source_bugs.bug import SourceBug

BUGS = (
    SourceBug(
        "passes",
        "lanes that bring weights run apart",
        "blocks/prompt/ring.py",
        (
            "        over the ring apart only. Who fills a stage is waited for by whoever uses "
            'it, and cannot fall behind."""\n'
            "        prim.warp_barrier()"
        ),
        (
            "        over the ring apart only. Who fills a stage is waited for by whoever uses "
            'it, and cannot fall behind."""\n'
            "        return"
        ),
    ),
    SourceBug(
        "passes",
        "a stage given back before all lanes have read",
        "blocks/prompt/ring.py",
        "        prim.warp_barrier()  # orders every lane's reads of the stage before the arrival\n",
        "",
    ),
    SourceBug(
        "passes",
        "no fence behind what others copy",
        "blocks/prompt/barrier.py",
        "        prim.fence_proxy_async()  # others' bulk copies read what was stored\n",
        "",
    ),
    SourceBug(
        "passes",
        "no fence before copies of what others stored",
        "blocks/prompt/barrier.py",
        (
            "        prim.wait_at_least_u64(self.counters[0], self.dues[1], scope=self.scope)\n"
            "        prim.fence_proxy_async()\n"
        ),
        "        prim.wait_at_least_u64(self.counters[0], self.dues[1], scope=self.scope)\n",
    ),
    SourceBug(
        "passes",
        "a phase ended before the block's warps have",
        "blocks/prompt/barrier.py",
        "        machine.hand_on()\n        self.dues[0]",
        "        self.dues[0]",
    ),
    SourceBug(
        "passes",
        "a phase begun by one thread alone",
        "blocks/prompt/barrier.py",
        (
            "            prim.wait_at_least_u64(self.counters[0], self.dues[0], "
            "scope=self.scope)\n"
            "        self.machine.meet()\n"
        ),
        "            prim.wait_at_least_u64(self.counters[0], self.dues[0], scope=self.scope)\n",
    ),
    SourceBug(
        "passes",
        "a phase without copies is not counted",
        "blocks/prompt/barrier.py",
        "        self.dues[1] += self.machine.world.blocks\n\n    @ch.inline\n    def begin_copies",
        "        pass\n\n    @ch.inline\n    def begin_copies",
    ),
    SourceBug(
        "passes",
        "added rows are not waited for before the stage is given back",
        "blocks/prompt/product.py",
        "        prim.wait_for_u32(prim.float_bits(last))  # came of every load of the stage\n",
        "",
    ),
    SourceBug(
        "passes",
        "no wgmma fence behind loaded registers",
        "blocks/prompt/product.py",
        "        prim.wgmma_fence()\n        descriptor = prim.matrix_descriptor(memory + ring.weights_bytes",
        "        descriptor = prim.matrix_descriptor(memory + ring.weights_bytes",
    ),
    SourceBug(
        "passes",
        "even registers where odd ones are multiplied",
        "blocks/prompt/product.py",
        "            self._multiply_stage(operands, sums, odd, previous, STAGE_TILES, ODD)",
        "            self._multiply_stage(operands, sums, even, previous, STAGE_TILES, ODD)",
    ),
    SourceBug(
        "passes",
        "scales of two tiles in one buffer",
        "blocks/prompt/finish.py",
        "        self.turn ^= 1\n        with ch.if_(machine.thread < plan.tile_tokens):\n",
        "        with ch.if_(machine.thread < plan.tile_tokens):\n",
    ),
    SourceBug(
        "passes",
        "squares laid over those that are added",
        "blocks/prompt/finish.py",
        "        machine.meet()  # everybody has read before the next tile's squares are laid down\n",
        "",
    ),
    SourceBug(
        "passes",
        "squares of M-tiles that there are not",
        "blocks/prompt/finish.py",
        "count = ch.minimum(ty.u32(self.m_tiles) - row_tile * plan.tile_m_tiles, plan.tile_m_tiles)",
        "count = ty.u32(plan.tile_m_tiles)",
    ),
    SourceBug(
        "passes",
        "keys behind a segment's last are cached",
        "blocks/prompt/keys.py",
        "            with ch.if_(in_group < place.count):\n",
        "            with ch.if_(True):\n",
    ),
    SourceBug(
        "passes",
        "values behind the last key are not zero",
        "blocks/prompt/keys.py",
        "        _clear_behind(heads, segment, key_tile)\n",
        "",
    ),
    SourceBug(
        "passes",
        "earlier keys of whole groups alone",
        "blocks/prompt/keys.py",
        "of_head = (segment.start - first_tile + (GROUP_TOKENS - 1)) // GROUP_TOKENS",
        "of_head = (segment.start - first_tile) // GROUP_TOKENS",
    ),
    SourceBug(
        "passes",
        "the partial tile of keys is taken for a whole one",
        "blocks/prompt/attention.py",
        "partial = first_key + (self.key_tile - 1) > rows.first\n",
        "partial = first_key + (self.key_tile - 1) > rows.first + (QUERY_TOKENS - 1)\n",
    ),
    SourceBug(
        "passes",
        "keys of a tile's tokens but the last few",
        "blocks/prompt/attention.py",
        "end = (place.position + place.count + (self.key_tile - 1)) // self.key_tile",
        "end = (place.position + place.count + (self.key_tile - 2)) // self.key_tile",
    ),
    SourceBug(
        "passes",
        "weights of the odd and the even tile swapped at the end",
        "blocks/prompt/attention.py",
        (
            "                self._finish_values(output, odd, previous)\n"
            "            with ch.else_():\n"
            "                self._finish_values(output, even, previous)"
        ),
        (
            "                self._finish_values(output, even, previous)\n"
            "            with ch.else_():\n"
            "                self._finish_values(output, odd, previous)"
        ),
    ),
    SourceBug(
        "passes",
        "values given back while they are multiplied",
        "blocks/prompt/attention.py",
        "        prim.wgmma_wait_all()\n        self.ring.release(previous)\n        self._bring_to_origin",
        "        self.ring.release(previous)\n        prim.wgmma_wait_all()\n        self._bring_to_origin",
    ),
    SourceBug(
        "passes",
        "parts added to the residual of another group",
        "blocks/prompt/parts.py",
        "added = words[_place(machine, m_tile, token_tile * groups + group)]",
        "added = words[_place(machine, m_tile, group)]",
    ),
    SourceBug(
        "passes",
        "a part's sums where those of the part before are",
        "blocks/prompt/product.py",
        "return Sums(place.m_tile + place.before, of_pass",
        "return Sums(place.m_tile, of_pass",
    ),
)
