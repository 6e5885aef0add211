"""The command line where there is a GPU: it writes text there, and its benchmark knows the ceiling."""

import json

import pytest
from commands import cheetah

pytestmark = pytest.mark.gpu


def test_text_is_the_same_as_in_the_emulator() -> None:
    options = ("--max-tokens", "20", "--temperature", "0", "--max-context", "96")
    texts = {
        device: cheetah("run", "demo", "One morning,", "--device", device, *options).stdout
        for device in ("cuda", "emulator")
    }
    assert texts["cuda"] == texts["emulator"]


@pytest.mark.gpu_alone
@pytest.mark.xdist_group("alone")
@pytest.mark.parametrize("sync", ["flags", "barrier"])
def test_a_speed_is_a_share_of_the_ceiling_of_the_same_run(sync: str) -> None:
    arguments = ("--contexts", "128", "--repetitions", "3", "--json", "-", "--device", "cuda", "--sync", sync)
    line = json.loads(cheetah("bench", "random:llama-3.2-1b", *arguments).stdout)
    before, after = line["ceiling_gb_per_s_samples"]
    assert abs(before / after - 1) < 0.05, "the ceiling moved during the run"
    assert line["gb_per_s"] < line["ceiling_gb_per_s"] and 0.2 < line["share"] < 1
    assert line["host_tokens_per_s"] < line["tokens_per_s"] and "note" not in line
    assert max(line["ms_per_step_samples"]) < 1.1 * min(line["ms_per_step_samples"])
