"""Bugs planted in what families and formats do otherwise."""

from __future__ import annotations

from tests.program.source_bugs.bug import SourceBug

BUGS = (
    SourceBug(
        "families",
        "a head's norm over half of its lanes",
        "blocks/attention/head_norms.py",
        "while mask < head_dim // UNIT:",
        "while mask < head_dim // UNIT // 2:",
        model="qwen3-0.6b",
    ),
    SourceBug(
        "families",
        "weights of queries for keys",
        "blocks/attention/head_norms.py",
        "kind = ch.select(raw.head < shape.heads, ty.u32(0), ty.u32(1))\n        words",
        "kind = ch.select(raw.head < shape.heads, ty.u32(0), ty.u32(0))\n        words",
        model="qwen3-0.6b",
    ),
    SourceBug(
        "families",
        "newest keys appended by every tile that reads them",
        "blocks/attention/item_loads.py",
        "with ch.if_(raw.column - item.tile.first_column < item.tile.columns):",
        "with ch.if_(True):",
        model="qwen3-0.6b",
        harmless="the same words, twice",
    ),
    SourceBug(
        "families",
        "newest keys laid over before they are appended",
        "blocks/attention/item_loads.py",
        "        machine.meet()  # what comes next is laid over these\n",
        "",
        model="qwen3-0.6b",
    ),
    SourceBug(
        "families",
        "biases of the first layer",
        "blocks/attention/step_port.py",
        "self.biases[layer * self.shape.qkv_rows + rows",
        "self.biases[layer * 0 + rows",
        model="qwen2.5-7b",
    ),
    SourceBug(
        "families",
        "squares of keys among the queries'",
        "blocks/attention/head_norms.py",
        "total.set(self._sum_of_lane(epoch, range(queries), place // 2))",
        "total.set(self._sum_of_lane(epoch, range(keys), place // 2))",
        model="olmo-2-1b",
    ),
    SourceBug(
        "families",
        "scales of heads read before they are there",
        "blocks/attention/head_norms.py",
        "                scales[place] = prim.rsqrt_f32(total * elements + self.epsilon)\n        machine.meet()\n",
        "                scales[place] = prim.rsqrt_f32(total * elements + self.epsilon)\n",
        model="olmo-2-1b",
    ),
    SourceBug(
        "families",
        "rows behind a norm without their scale",
        "blocks/linear/norm_behind.py",
        "made * scale.of(column, scale.arguments) * weight",
        "made * weight",
        model="gemma-3-1b",
    ),
    SourceBug(
        "families",
        "kept rows of the wave before",
        "blocks/linear/norm_behind.py",
        "m_tile = ch.const(ty.u32, position + turn // pairs * layout.blocks",
        "m_tile = ch.const(ty.u32, position + turn // pairs * 0 * layout.blocks",
        model="gemma-3-1b",
    ),
    SourceBug(
        "families",
        "the plan of the other kind of layers",
        "blocks/attention/schedule.py",
        "return chosen(self.index[role.name], self.kind)",
        "return chosen(self.index[role.name], 0)",
        model="gemma-3-1b",
    ),
    SourceBug(
        "families",
        "records of both kinds in one place",
        "blocks/attention/schedule.py",
        'self.machine.region("records", kept_plan))[self.kind]',
        'self.machine.region("records", kept_plan))[0]',
        model="gemma-3-1b",
    ),
    SourceBug(
        "families",
        "the period of layers is one longer",
        "blocks/by_layer.py",
        "place = ch.cast(ty.u32, layer) % len(period) if",
        "place = ch.cast(ty.u32, layer) % (len(period) + 1) if",
        model="gemma-3-1b",
    ),
    SourceBug(
        "families",
        "angles of the other table",
        "blocks/attention/step_port.py",
        (
            "return self.query_angles\n"
            "        return ch.select(head < self.shape.heads, ty.u32(self.query_angles), "
            "ty.u32(self.key_angles))"
        ),
        (
            "return 0\n"
            "        return ch.select(head < self.shape.heads, ty.u32(self.query_angles), "
            "ty.u32(self.key_angles))"
        ),
        model="gemma-3-1b",
    ),
    SourceBug(
        "families",
        "the multiplier of the residual left out",
        "blocks/linear/epilogue.py",
        "return made if self.multiplier == 1 else made * self.multiplier",
        "return made",
        model="granite-3.3-2b",
    ),
    SourceBug(
        "formats",
        "zero points times the sums of the other column",
        "blocks/linear/formats/integers.py",
        "of_columns = kept.x, kept.y\n",
        "of_columns = kept.y, kept.x\n",
        model="llama-3.2-1b@int4",
    ),
    SourceBug(
        "formats",
        "sums of vectors of the first group of a tile",
        "blocks/linear/formats/vector_sums.py",
        "return (index * activations.columns.tiles + group) * COLUMNS",
        "return (0 * index * activations.columns.tiles + group) * COLUMNS",
        model="llama-3.2-1b@int4-g32",
    ),
    SourceBug(
        "formats",
        "no warp barrier behind the vectors' sums",
        "blocks/linear/chunks.py",
        "        prim.warp_barrier()  # all lanes read what the first four have stored\n",
        "",
        model="llama-3.2-1b@int4",
    ),
    SourceBug(
        "formats",
        "factors of the first rows for all",
        "blocks/linear/formats/quantized.py",
        "(low if index < 2 else high)",
        "low",
        model="llama-3.2-1b@fp8",
    ),
    SourceBug(
        "formats",
        "sums of vectors once a product of several waves",
        "blocks/linear/chunks.py",
        "with ch.if_(layout.waves == 1 or is_first):\n                self._sum_chunk",
        "with ch.if_(layout.waves == 1 or ~is_first):\n                self._sum_chunk",
        model="llama-3.2-1b@int4",
    ),
)
