"""Bugs planted in the ring, in products and in what blocks exchange."""

from __future__ import annotations

from tests.program.source_bugs.bug import SourceBug

BUGS = (
    SourceBug(
        "ring",
        "parity of a stage ahead without the wrap",
        "blocks/ring.py",
        "(self.using.parity + place // self.stages) % 2)\n        chunk",
        "self.using.parity)\n        chunk",
    ),
    SourceBug(
        "ring",
        "cursor moved before its parity is worked out",
        "blocks/ring.py",
        (
            "        self.using.parity.set((self.using.parity + place // self.stages) % 2)\n"
            "        self.using.stage.set(place % self.stages)"
        ),
        (
            "        self.using.stage.set(place % self.stages)\n"
            "        self.using.parity.set((self.using.parity + place // self.stages) % 2)"
        ),
        harmless="the place is worked out before",
    ),
    SourceBug(
        "ring",
        "no warp barrier before a stage of weights is given back",
        "blocks/ring.py",
        (
            "        yield Stage(chunk)\n"
            "        prim.warp_barrier()  # orders every lane's reads of the stage before the "
            "arrival\n"
        ),
        "        yield Stage(chunk)\n",
    ),
    SourceBug(
        "ring",
        "stages used up in vain: a chunk too few",
        "blocks/linear/matvec.py",
        "with ch.for_(layout.chunks, unroll=1):\n                self.ring.discard()",
        "with ch.for_(layout.chunks - 1, unroll=1):\n                self.ring.discard()",
    ),
    SourceBug(
        "ring",
        "the producer waits for a landed chunk of the stage it fills",
        "blocks/ring.py",
        "prim.mbarrier_wait(self.full + self.landed.stage, self.landed.parity)",
        "prim.mbarrier_wait(self.full + self.filling.stage, self.landed.parity)",
    ),
    SourceBug(
        "ring",
        "one stage's empty barrier counts a warp less",
        "blocks/ring.py",
        "prim.mbarrier_init(self.empty + stage, self.machine.plan.consumer_warps)",
        (
            "prim.mbarrier_init(self.empty + stage, self.machine.plan.consumer_warps - ty.u32(1) "
            "* ch.select(stage == self.stages - 1, ty.u32(1), ty.u32(0)))"
        ),
    ),
    SourceBug(
        "reductions",
        "the turn's parity not put back behind a product",
        "blocks/linear/reductions.py",
        "        self.turn.parity ^= 1  # once round the reductions: where it was\n",
        "",
    ),
    SourceBug(
        "reductions",
        "an adding warp leaves a product before all have scaled",
        "blocks/linear/adding.py",
        "        prim.mbarrier_wait(self.reductions.loaded, self.loaded_parity)\n        self.loaded_parity.set",
        "        self.loaded_parity.set",
        harmless=(
            "with flags a sum says itself that it is there; behind the barrier every adding warp "
            "has columns of each M-tile"
        ),
    ),
    SourceBug(
        "reductions",
        "scales are read before the input is there",
        "blocks/linear/adding.py",
        "            prim.mbarrier_wait(self.loaded, self.parity)\n",
        "",
    ),
    SourceBug(
        "reductions",
        "a lane arrives while others wait for an earlier input",
        "blocks/linear/adding.py",
        "        prim.warp_barrier()  # no lane waits for an earlier input any more\n",
        "",
        missed="a lane would have to be a phase late",
    ),
    SourceBug(
        "reductions",
        "no warp barrier before sums are taken",
        "blocks/linear/adding.py",
        "        prim.warp_barrier()  # orders the lanes' reads, and what they have stored, before the arrival\n",
        "",
    ),
    SourceBug(
        "reductions",
        "no warp barrier before sums are told",
        "blocks/linear/reductions.py",
        "        prim.warp_barrier()  # orders the lanes' sums before the arrival\n",
        "",
    ),
    SourceBug(
        "reductions",
        "the step's end of adding warps waited for a step early",
        "blocks/linear/reductions.py",
        "prim.mbarrier_wait(self.step_added, step % 2)",
        "prim.mbarrier_wait(self.step_added, (step + 1) % 2)",
    ),
    SourceBug(
        "reductions",
        "other columns of the M-tile summed where warps share them",
        "blocks/linear/adding.py",
        "own = reduction + (column // 2 * plan.pair_sums + lane)",
        "own = reduction + (column // 2 % 2 * plan.pair_sums + lane)",
    ),
    SourceBug(
        "reductions",
        "loaded counts one adding warp less",
        "blocks/linear/reductions.py",
        "prim.mbarrier_init(self.loaded, 1 + plan.adding_warps)",
        "prim.mbarrier_init(self.loaded, plan.adding_warps)",
    ),
    SourceBug(
        "slices",
        "a part loaded over one that is read",
        "blocks/linear/prologue.py",
        "                self.columns.machine.meet()  # everybody has read the last part before it is loaded over\n",
        "                pass\n",
    ),
    SourceBug(
        "slices",
        "every part in the first half",
        "blocks/linear/copied.py",
        "place = part % 2 * slice_chunks",
        "place = part * 0 * slice_chunks",
    ),
    SourceBug(
        "slices",
        "a part released before others have multiplied it",
        "blocks/linear/copied.py",
        "        self.columns.machine.meet()\n        with ch.if_(part + 2 < self.count)",
        "        with ch.if_(part + 2 < self.count)",
    ),
    SourceBug(
        "slices",
        "the last part as long as the others",
        "blocks/linear/copied.py",
        "return ch.minimum(self.matrix.k_tiles - part * self.part_tiles, self.part_tiles)",
        "return self.part_tiles",
    ),
    SourceBug(
        "slices",
        "parities of a half turned for one piece alone",
        "blocks/vector_copies.py",
        "bits = (1 << pieces) - 1",
        "bits = 1",
    ),
    SourceBug(
        "slices",
        "no fence before vectors are copied over what was read",
        "blocks/vector_copies.py",
        "            prim.fence_proxy_async_global()\n            prim.fence_proxy_async_shared()\n",
        "            prim.fence_proxy_async_shared()\n",
    ),
    SourceBug(
        "slices",
        "no warp barrier behind converted units",
        "blocks/linear/copied.py",
        "            prim.warp_barrier()  # other lanes of this warp read what this one has stored\n",
        "            pass\n",
        model="llama-3.2-1b@int4-g32",
        missed="the lanes of a warp meet at the next product, where the emulator has no weak memory",
    ),
    SourceBug(
        "narrow",
        "norm weights of M-tiles of 16 rows",
        "blocks/linear/epilogue.py",
        "self.weights[rows.m_tile * rows.count + rows.row]",
        "self.weights[rows.m_tile * M_TILE_ROWS + rows.row]",
    ),
    SourceBug(
        "narrow",
        "published where M-tiles of 16 rows lie",
        "blocks/linear/epilogue.py",
        "publishing(machine, self.into, rows, rows.m_tile * rows.count, rows.count)",
        "publishing(machine, self.into, rows, rows.m_tile * M_TILE_ROWS, rows.count)",
    ),
    SourceBug(
        "narrow",
        "halves of a single token the wrong way round",
        "blocks/linear/reductions.py",
        "            return index, 0\n",
        "            return 1 - index, 0\n",
        model="qwen3-0.6b",
    ),
    SourceBug(
        "narrow",
        "squares of 16 lanes",
        "blocks/linear/rms.py",
        "mask = count // 2\n",
        "mask = 8\n",
    ),
    SourceBug(
        "narrow",
        "both halves of the rows are finished",
        "blocks/linear/adding.py",
        "                is_own = is_own & (lane % M_TILE_ROWS < count)\n",
        "                pass\n",
    ),
    SourceBug(
        "epilogues",
        "up rows are published too",
        "blocks/linear/epilogue.py",
        "publish = publishing(self.machine, self.into, rows, rows.m_tile * count, count)",
        "publish = publishing(self.machine, self.into, rows, rows.m_tile * count, rows.count)",
    ),
    SourceBug(
        "epilogues",
        "residual rows of several columns overlap",
        "blocks/linear/epilogue.py",
        "(rows.wave * rows.count + rows.row) * machine.plan.tokens + rows.column",
        "(rows.wave * rows.count + rows.row) * min(machine.plan.tokens, 8) + rows.column",
    ),
    SourceBug(
        "epilogues",
        "the last row of an M-tile published without its residual",
        "blocks/linear/epilogue.py",
        '        weighted = ch.const(ty.f32, value * weight, name="weighted")\n',
        (
            "        weighted = ch.const(ty.f32, value * ch.select(rows.wave == 0, weight, "
            'ty.f32(1.0)), name="weighted")\n'
        ),
    ),
    SourceBug(
        "epilogues",
        "angles of pairs of frequencies",
        "blocks/linear/epilogue.py",
        "frequency = m_tile_of_head * HALF + rows.row % HALF",
        "frequency = m_tile_of_head * HALF + rows.row % HALF // 2 * 2",
    ),
    SourceBug(
        "squares",
        "a word behind the last square not published",
        "blocks/linear/rms.py",
        "for behind in range(1, WORDS - self.m_tiles % WORDS + 1)",
        "for behind in range(1, WORDS - self.m_tiles % WORDS)",
    ),
    SourceBug(
        "squares",
        "units of a lane overlap",
        "blocks/linear/rms.py",
        "UNITS_AT_ONCE * lanes, unroll=1) as first",
        "lanes, unroll=1) as first",
        missed="hidden vectors of more than 512 rows; any run on a GPU shows it",
    ),
    SourceBug(
        "squares",
        "the column's lanes mixed with its neighbour's",
        "blocks/linear/rms.py",
        "lanes = 32 if self.columns.limit == 1 else M_TILE_ROWS",
        "lanes = 32",
    ),
    SourceBug(
        "squares",
        "squares of columns that are not in use waited for",
        "blocks/linear/rms.py",
        "with self.columns.if_active(column):",
        "with ch.if_(True):",
    ),
    SourceBug(
        "exchange",
        "candidates published without release",
        "blocks/sampling.py",
        'self.exchange.publish_release("candidates"',
        'self.exchange.publish("candidates"',
    ),
    SourceBug(
        "exchange",
        "candidates read without acquire",
        "blocks/sampling.py",
        "units[other] = self.exchange.read4_acquire(",
        "units[other] = self.exchange.read4(",
    ),
    SourceBug(
        "exchange",
        "grid barrier: no block barrier before the arrival",
        "blocks/exchange_kinds.py",
        (
            "            self.machine.meet()\n"
            "            with ch.if_(self.machine.thread == 0):\n"
            "                self.arrivals_due +="
        ),
        "            with ch.if_(self.machine.thread == 0):\n                self.arrivals_due +=",
    ),
    SourceBug(
        "exchange",
        "grid barrier: no block barrier behind the wait",
        "blocks/exchange_kinds.py",
        (
            "                prim.wait_at_least_u64(self.counter, self.arrivals_due, "
            "scope=self.scope)\n"
            "            self.machine.meet()\n"
        ),
        "                prim.wait_at_least_u64(self.counter, self.arrivals_due, scope=self.scope)\n",
    ),
    SourceBug(
        "exchange",
        "grid barrier: a round begins where the ticket stands",
        "blocks/exchange_kinds.py",
        "arrivals_due.set((ticket // self.machine.world.blocks + 1) * self.machine.world.blocks)",
        "arrivals_due.set(ticket + 1)",
    ),
    SourceBug(
        "exchange",
        "a part of an input in the other half",
        "blocks/exchange_vectors.py",
        "return part * (self.apart * self.part_words) + place + self.offset",
        "return part * self.part_words + place + self.offset",
    ),
    SourceBug(
        "exchange",
        "embeddings published with the layer's epoch",
        "models/dense/head_parts.py",
        "begin = self.onto_residual(vector, norm, self.step_epoch, multiplier, is_first=True)",
        "begin = self.onto_residual(vector, norm, self.step_epoch + 1, multiplier, is_first=True)",
    ),
    SourceBug(
        "exchange",
        "epochs of a step not rounded to the tags",
        "plan/kv/tables.py",
        "return 1 + layers + round_up(others, EXCHANGE_TAGS)",
        "return 1 + layers + others",
    ),
    SourceBug(
        "exchange",
        "no meeting behind the embeddings where the grid meets",
        "models/dense/step.py",
        "            machine.meet()\n            self.exchange.meet()\n",
        "            machine.meet()\n",
    ),
)
