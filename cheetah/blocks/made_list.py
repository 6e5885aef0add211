"""A list that the consumer warps make on the device in a step, and that other roles follow: which experts a layer's
tokens chose.

It lies in shared memory: how many entries it has, then those. Two mbarriers keep its makers and its followers apart.

* made: one arrival, of the first consumer thread, behind a meeting of the consumer warps that follows all their writes
  of the list; or behind a barrier of the first warp, which has made it by itself (`tell`), and then the other consumer
  warps wait for it too. A follower waits for it (acquire) and then sees the whole list.
* followed: an arrival of every follower, the producer lane and each adding warp, behind its last read of the list. The
  consumer warps wait for it before they write the next one.

So a list is never replaced under a follower, and neither side can come two lists ahead of the other: a parity tells two
neighbouring ones apart. The consumer warps read their own list, too; their reads lie between two of their meetings.

An entry is data: it is bounded here, before anybody makes an address of it, and so is how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cheetah import lang as ch
from cheetah.lang import prim, ty


@dataclass(eq=False)
class MadeList:
    """Up to `room` numbers below `limit`, in the regions `name` and `name`_barriers. machine: of a step, or, with other
    followers, of a pass."""

    machine: Any
    name: str
    room: int
    limit: int
    _parities: dict[ch.Role, Any] = field(default_factory=dict)

    @ch.inline
    def declare(self) -> None:
        """Name what lies in shared memory, and give each role its place."""
        made = self.machine.region(f"{self.name}_barriers", ty.u64)
        self.made, self.followed = made, made + 1
        for role in self.machine.roles:
            with role:
                self._parities[role] = ch.var(ty.u32, 0, name=f"{self.name}_parity")

    @ch.inline
    def initialise(self) -> None:
        """Set the barriers up, as `Ring.initialise`."""
        prim.mbarrier_init(self.made, 1)
        prim.mbarrier_init(self.followed, self.followers)

    @property
    def followers(self) -> int:
        """Arrivals that say that a list is followed no more."""
        adding_warps: int = self.machine.plan.adding_warps
        return 1 + adding_warps

    def is_lane(self, role: ch.Role) -> bool:
        """Whether a role that follows is a single lane; else it is whole warps."""
        return role is self.machine.producer

    @property
    def words(self) -> Any:
        """How many entries there are, then those (u32)."""
        return self.machine.region(self.name, ty.u32)

    @property
    def count(self) -> Any:
        """How many entries there are, `room` at most."""
        return ch.minimum(self.words[0], self.room)

    def entry(self, index: Any) -> Any:
        """Entry `index`, below `limit` whatever stands there."""
        return ch.minimum(self.words[index + 1], self.limit - 1)

    # -- the consumer role -----------------------------------------------------------------------------------------

    @ch.inline
    def begin_making(self) -> None:
        """Until nobody follows the last list any more. The parity of a fresh barrier's last phase is 1."""
        prim.mbarrier_wait(self.followed, self._parities[self.machine.consumer] ^ 1)

    @ch.inline
    def finish_making(self) -> None:
        """The list is made: to be followed by all other roles, and read by all consumer warps."""
        self.machine.meet()  # orders what all warps have written before the arrival
        with ch.if_(self.machine.thread == 0):
            prim.mbarrier_arrive(self.made)
        self._turn(self.machine.consumer)

    @ch.inline
    def tell(self) -> None:
        """By the first consumer warp, where it has made the list by itself: it is to be followed."""
        prim.warp_barrier()  # orders what its lanes have written before the arrival
        with ch.if_(self.machine.lane == 0):
            prim.mbarrier_arrive(self.made)

    @ch.inline
    def finish_told(self) -> None:
        """By all consumer warps, of a list that was told of: from here on they read it."""
        prim.mbarrier_wait(self.made, self._parities[self.machine.consumer])
        self._turn(self.machine.consumer)

    # -- the other roles -------------------------------------------------------------------------------------------

    @ch.inline
    def begin_following(self, role: ch.Role) -> None:
        """Until the list is made."""
        prim.mbarrier_wait(self.made, self._parities[role])

    @ch.inline
    def finish_following(self, role: ch.Role) -> None:
        """This lane of a role of one lane, or this warp, reads the list no more."""
        if self.is_lane(role):
            prim.mbarrier_arrive(self.followed)
        else:
            prim.warp_barrier()  # orders the lanes' reads before the arrival
            with ch.if_(self.machine.lane == 0):
                prim.mbarrier_arrive(self.followed)
        self._turn(role)

    def _turn(self, role: ch.Role) -> None:
        self._parities[role].set(self._parities[role] ^ 1)
