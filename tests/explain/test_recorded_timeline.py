"""Where the rows of a recording are what."""

import torch
from torch import nn

from refimpl.explain.recorded_timeline import RecordedTimeline
from refimpl.explain.recorder import ScriptRecorder


def test_the_backward_of_the_block_that_ran_last_begins_where_its_call_ended():
    model, ones = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))), torch.ones(2, 4)
    with ScriptRecorder() as recorder:
        model(ones).backward(ones)
    timeline = RecordedTimeline(recorder.recording())
    [call] = [call for call in timeline.recording.calls if call.path == "0"]
    [tanh] = timeline.kept_by(call)
    assert timeline.begins_backward(tanh, call) == call.end + 1
