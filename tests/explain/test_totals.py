"""Programs as people write them, unmodified: the total is what the allocator alone says, and each ends by itself."""

import pytest
from allocator_peaks import peak_of
from explain_kit import PROGRAMS

from refimpl.explain import Explanation, Script, run
from refimpl.explain.recorded_timeline import RecordedTimeline

ALL = sorted(path.stem for path in PROGRAMS.glob("*.py"))
PUSHED = ("closures", "given_up", "graph", "input_gradients", "log_probabilities", "policy", "recurrent",
          "replay_buffer", "resumed", "small_gpt", "sums", "two_networks")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.core if name in PUSHED else pytest.mark.nightly)
                                  for name in ALL])
def test_the_total_is_the_allocator_s(name):
    made = run(Script(PROGRAMS / f"{name}.py"), 2)
    assert made.done, made.words
    peak, alone = RecordedTimeline(made.recording).peak, peak_of(PROGRAMS / f"{name}.py", len(made.recording.steps))
    assert abs(peak - alone) <= 0.005 * alone, (peak, alone)
    assert str(Explanation(made))
