"""Bugs planted in regions of shared memory, tokens, sampling and filters."""

from __future__ import annotations

from tests.program.source_bugs.bug import SourceBug

BUGS = (
    SourceBug(
        "regions",
        "states of attention over the queries",
        "plan/regions.py",
        "        skip += nbytes\n    return tuple(regions)\n\n\ndef attention_records",
        (
            '        skip += nbytes if name != "attention" else nbytes // 2\n'
            "    return tuple(regions)\n"
            "\n"
            "\n"
            "def attention_records"
        ),
    ),
    SourceBug(
        "regions",
        "sums laid over the input's last K-tile",
        "plan/regions.py",
        "*_behind_vector(of_products, vector_bytes, scratch)",
        "*_behind_vector(of_products, max(0, vector_bytes - 64), scratch)",
    ),
    SourceBug(
        "regions",
        "listed tokens over what filters know",
        "plan/regions.py",
        ('skip += round_up(max(nbytes, candidates) if name == "listed" else nbytes, BULK_ALIGNMENT)'),
        'skip += round_up(nbytes // 2 if name == "listed" else nbytes, BULK_ALIGNMENT)',
    ),
    SourceBug(
        "regions",
        "warp candidates of one group alone",
        "plan/regions.py",
        "plan.finishing_groups * plan.tokens * 8)",
        "plan.tokens * 8)",
    ),
    SourceBug(
        "tokens",
        "columns of a cancelled sequence: the host's word by column",
        "blocks/host_words.py",
        "self.launch.cancelled + sequence, scope",
        "self.launch.cancelled + self.columns.machine.thread + 0 * sequence, scope",
    ),
    SourceBug(
        "tokens",
        "a cancelled sequence goes on",
        "blocks/tokens.py",
        "with ch.if_((following >= total) | (sampled == CANCELLED_TOKEN)):",
        "with ch.if_(following >= total):",
    ),
    SourceBug(
        "tokens",
        "the order to end kept for the next step's first sequence",
        "blocks/host_words.py",
        "is_cancelled = (self.columns.machine.number == 0) & (self.columns.state(column, CANCELLED) != 0)",
        "is_cancelled = self.columns.state(0, CANCELLED) != 0",
    ),
    SourceBug(
        "tokens",
        "tokens emitted a place early",
        "blocks/tokens.py",
        "self._emit(place, sampled)",
        "self._emit(place - 1, sampled)",
    ),
    SourceBug(
        "tokens",
        "the number of a column times all columns",
        "blocks/advance.py",
        '        return step * per_step + records.record(column, "number")',
        ('        return step * records.count + records.record(column, "number") + 0 * per_step'),
    ),
    SourceBug(
        "tokens",
        "the next token let be read before it is written",
        "blocks/tokens.py",
        "            prim.warp_barrier()  # every lane's tokens are written before lane 0 lets them be read\n",
        "",
    ),
    SourceBug(
        "tokens",
        "all warps do not meet behind the tokens",
        "blocks/tokens.py",
        "                prim.mbarrier_arrive(self.step_done)\n        machine.meet()\n",
        "                prim.mbarrier_arrive(self.step_done)\n",
    ),
    SourceBug(
        "tokens",
        "a token without a number indexes the embedding",
        "blocks/tokens.py",
        "self.next_token[column] = ch.minimum(sampled, self.rows - 1)",
        "self.next_token[column] = sampled",
    ),
    SourceBug(
        "sampling",
        "candidates compared before the adding warps laid them down",
        "blocks/sampling.py",
        "        self.adding.reductions.wait_for_step(step)\n        machine.meet()  # the head's",
        "        machine.meet()  # the head's",
    ),
    SourceBug(
        "sampling",
        "candidates lie over the input while it is read",
        "blocks/sampling.py",
        "        machine.meet()  # the head's input is used no more: the blocks' candidates may lie over it\n",
        "",
        harmless="who has handed sums over has read the input",
    ),
    SourceBug(
        "sampling",
        "candidates of a column of two that one column has",
        "blocks/sampling.py",
        ('_, best_token = self._best_of("candidates", column, self.places, machine.world.blocks)'),
        ('_, best_token = self._best_of("candidates", column, self.columns.limit, machine.world.blocks)'),
    ),
    SourceBug(
        "sampling",
        "gathered candidates read before all are there",
        "blocks/sampling.py",
        "        self._gather(first_word // 4, epoch)\n        machine.meet()\n",
        "        self._gather(first_word // 4, epoch)\n",
    ),
    SourceBug(
        "sampling",
        "masks by sequence, not by slot",
        "blocks/adjustments.py",
        'plan, slot = self.columns.machine.plan, self.of(column, "slot")',
        "plan, slot = self.columns.machine.plan, self.columns.state(column, SEQUENCE)",
    ),
    SourceBug(
        "sampling",
        "rows of biases and counts by sequence, not by slot",
        "blocks/adjustments.py",
        'return self.of(column, "slot") * self.vocab',
        "return self.columns.state(column, SEQUENCE) * self.vocab",
    ),
    SourceBug(
        "sampling",
        "penalties before biases",
        "blocks/adjustments.py",
        (
            "        with ch.if_((options & BIASED) != 0):\n"
            "            adjusted += "
            "prim.bits_float(prim.load_constant_u32(self.launch.logit_bias + (self.row(column) + "
            "token)))\n"
            "        with ch.if_((options & PENALISED) != 0):\n"
            "            self._penalise(column, token, adjusted)\n"
        ),
        (
            "        with ch.if_((options & PENALISED) != 0):\n"
            "            self._penalise(column, token, adjusted)\n"
            "        with ch.if_((options & BIASED) != 0):\n"
            "            adjusted += "
            "prim.bits_float(prim.load_constant_u32(self.launch.logit_bias + (self.row(column) + "
            "token)))\n"
        ),
    ),
    SourceBug(
        "sampling",
        "counted by another block than reads the count",
        "blocks/adjustments.py",
        "== self.head.position_of_all(machine.number)",
        "== machine.number",
    ),
    SourceBug(
        "sampling",
        "tokens of a column that nobody samples are counted",
        "blocks/adjustments.py",
        "            with ch.if_(self.is_sampled(column)):\n",
        "            with ch.if_(True):\n",
    ),
    SourceBug(
        "filters",
        "what lanes still have is not left out",
        "blocks/filters/lists.py",
        "left_out = highest_of_warp(ch.maximum(nearest.nearest.left_out, nearest.first[0]))",
        "left_out = highest_of_warp(nearest.nearest.left_out)",
    ),
    SourceBug(
        "filters",
        "dropped is the new one, always",
        "blocks/filters/lists.py",
        "dropped = ch.select(above_second, self.nearest.second, scaled)",
        "dropped = scaled",
        harmless="what the lists know seems less: rounds decide",
    ),
    SourceBug(
        "filters",
        "ties between candidates are not left open",
        "blocks/filters/lists.py",
        "with ch.if_((following == self.units) | (ties > 1)):",
        "with ch.if_(following == self.units):",
        harmless="two draws would have to be equal to the bit",
    ),
    SourceBug(
        "filters",
        "one token more than top_k",
        "blocks/filters/lists.py",
        "with ch.else_(), ch.if_(count < most):",
        "with ch.else_(), ch.if_(count <= most):",
    ),
    SourceBug(
        "filters",
        "weights relative to another block's highest",
        "blocks/filters/lists.py",
        "weight.set(weight * prim.exp_f32(highest - both) + other_weight * prim.exp_f32(other - both))",
        "weight.set(weight + other_weight * prim.exp_f32(other - both))",
        missed="weights of lists of two blocks would have to differ much",
    ),
    SourceBug(
        "filters",
        "lists of both steps in one place",
        "blocks/filters/lists.py",
        "return (step % 2 * self.warps.columns.limit + column) * self.units",
        "return (step * 0 + column) * self.units",
        missed="a block without any M-tile: in tests/program",
    ),
    SourceBug(
        "filters",
        "a round's vector is the last one's",
        "blocks/filters/rounds.py",
        "return (ch.cast(ty.u32, index) % 2 * self.warps",
        "return (ch.cast(ty.u32, index) * 0 * self.warps",
    ),
    SourceBug(
        "filters",
        "a round's epoch is the candidates'",
        "blocks/filters/rounds.py",
        (
            "self._weigh_all(epoch + 1 + index, index)\n"
            "            self.exchange.meet()\n"
            "            self._judge_all(epoch + 1 + index, index)"
        ),
        (
            "self._weigh_all(epoch + index, index)\n"
            "            self.exchange.meet()\n"
            "            self._judge_all(epoch + index, index)"
        ),
        harmless="epochs are told apart by vector",
    ),
    SourceBug(
        "filters",
        "a warp's list written over before it is published",
        "blocks/filters/lists.py",
        "        prim.warp_barrier()  # it is read: the warp's next column may lie over it\n",
        "",
        harmless="shuffles lie between",
    ),
    SourceBug(
        "tokens",
        "the host's word taken before all candidates are published",
        "blocks/sampling.py",
        "        answers = [host.ask() for host in hosts]\n",
        (
            "        answers = [host.ask() for host in hosts]\n"
            "        for host, answer in zip(hosts, answers, strict=True):\n"
            "            host.take(answer)\n"
        ),
    ),
)
