"""What grows in the programs: nothing but what their authors were told of, with the bytes, the line and the holder."""

import pytest
import torch
from explain_kit import PROGRAMS

from refimpl.explain import Explanation, Script, run
from refimpl.explain.kept.names import CYCLE
from refimpl.explain.kinds import KEPT

MADE = "state.to(device)" if torch.cuda.is_available() else "torch.rand(4, 84, 84)"
GROW = {"copies_at_saving": (28_348_416, "copy.deepcopy(self)", CYCLE, "state_dict()"),
        "input_gradients": (786_432, "f = net(x)", "`.grad` of `photos[…]`", "x.detach().requires_grad_()"),
        "losses_kept": (4, "cross_entropy", "`losses`", ""),
        "replay_buffer": (677_412, MADE, "`Agent.memory`", "")}
ALL = sorted(path.stem for path in PROGRAMS.glob("*.py"))


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in GROW else pytest.mark.nightly)
                                  for name in ALL])
def test_what_grows_is_what_was_reported(name):
    found = run(Script(PROGRAMS / f"{name}.py")).recording.grows or []
    assert len(found) == (name in GROW), found
    for grows in found:
        nbytes, text, holder, cure = GROW[name]
        assert (grows.nbytes, grows.holder) == (nbytes, holder)
        assert text in grows.lines[0].text and cure in grows.cure


def test_what_a_script_keeps_is_no_temporary():
    found = Explanation(run(Script(PROGRAMS / "replay_buffer.py")))
    rest = dict(found.arithmetic.rest)
    frame = 4 * 84 * 84 * 4
    assert rest[KEPT] > 2 * 60 * frame and f"{rest[KEPT]:+,}  {KEPT}" in str(found)
    [kept] = found.kept
    assert kept.holder == "`Agent.memory`" and kept.nbytes > 2 * 60 * frame
    assert f"{kept.nbytes:,}  made at " in str(found).partition("keeps from step to step")[2]
