"""The hardware's own operations, used as `ch.prim.warp_sum_f32(x)`.

Kernel text names only these and plain C. The emulator's header (`cheetah_emulator.h`) defines the same functions in
C++, so that one text runs in both worlds; a test compares the two lists.
"""

from cheetah.lang.primitives.block import *  # noqa: F403
from cheetah.lang.primitives.copies import *  # noqa: F403
from cheetah.lang.primitives.exchange import *  # noqa: F403
from cheetah.lang.primitives.numbers import *  # noqa: F403
from cheetah.lang.primitives.tensor import *  # noqa: F403
from cheetah.lang.primitives.warpgroup import *  # noqa: F403
