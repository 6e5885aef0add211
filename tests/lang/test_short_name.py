"""`import cheetah as ch` is the language, loaded when it is asked for."""

import subprocess
import sys

import cheetah as ch
from cheetah import lang, ty


def test_the_package_offers_the_whole_language() -> None:
    assert set(lang.__all__) <= set(dir(ch))
    assert all(getattr(ch, name) is getattr(lang, name) for name in lang.__all__)


def test_a_kernel_as_the_paper_writes_it() -> None:
    @ch.kernel(ch.Params(n=ty.u32, x=ch.ty.ptr_mut(ty.f32)))
    def double(n, x):  # type: ignore[no-untyped-def]
        with ch.if_(ch.thread_idx_x() < n):
            x[ch.thread_idx_x()] *= 2

    assert "if (threadIdx.x < n) x" in ch.render(double)


def test_importing_the_package_loads_neither_language_nor_runtime() -> None:
    script = (
        "import sys, cheetah as ch\n"
        "from cheetah import errors\n"
        "assert not {'cheetah.lang', 'cheetah.runtime'} & set(sys.modules), sorted(sys.modules)\n"
        "ch.if_\n"
        "assert 'cheetah.lang' in sys.modules and 'cheetah.runtime' not in sys.modules\n"
        "try:\n    ch.nothing\nexcept AttributeError as error:\n    print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.stdout == "module 'cheetah' has no attribute 'nothing'\n", run.stderr
