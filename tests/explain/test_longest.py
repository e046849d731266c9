"""What is said of the longest batch of a loader, beside the run that has it."""

import re
from types import SimpleNamespace

import pytest
from explain_kit import explained

from refimpl.explain import longest

LENGTHS = "30, 28, 3, 41, 52, 44, 120, 61"
SCRIPT = f"""
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
data = [{{"input_ids": list(range(1, 1 + n))}} for n in [{LENGTHS}]]


def collate(items):
    longest = max(len(item["input_ids"]) for item in items)
    ids = torch.tensor([item["input_ids"] + [0] * (longest - len(item["input_ids"])) for item in items])
    return {{"input_ids": ids, "labels": ids}}


model = LlamaForCausalLM(LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                     num_attention_heads=4, num_key_value_heads=2, attn_implementation="eager"))
optimizer = torch.optim.AdamW(model.parameters())
for batch in DataLoader(data, batch_size=2, collate_fn=collate):
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def said(explanation):
    return [note for note in explanation.notes if "a loader's data" in note]


def test_the_peak_of_the_longest_batch(tmp_path):
    [note] = said(explained(tmp_path / "script.py", SCRIPT))
    assert "up to 52 tokens a row, and item 6 of a loader's data has 120" in note
    promised = int(re.search(r"about ([\d,]+) bytes", note)[1].replace(",", ""))
    peak = explained(tmp_path / "script.py", SCRIPT, steps=4).timeline.peak
    assert abs(promised - peak) <= 0.001 * peak, (promised, peak)


@pytest.mark.parametrize("change", [
    (LENGTHS, "30, 28, 3, 41, 52, 44, 20, 52"), (LENGTHS, "52, 28, 3, 52, 52, 44, 120, 61"),  # none longer; one length
    ("for n in [", "for n in ["), ("data, batch_size", "iter(data), batch_size")])
def test_nothing_is_said_of_what_is_not_known(tmp_path, change):
    if change[0] == change[1]:  # a row more than the others had
        change = "batch_size=2", "batch_sampler=[[0], [2, 3], [4, 5], [6, 7]]"
    elif "iter" in change[1]:  # a stream
        change = "DataLoader(data, batch_size=2, collate_fn=collate)", "map(collate, zip(data[::2], data[1::2]))"
    assert not said(explained(tmp_path / "script.py", SCRIPT, [change]))


TINY = """
import torch
from torch.utils.data import DataLoader

data = [{"input_ids": [0] * n} for n in (2, 3, 5)]
loader = DataLoader(data)
model = torch.nn.Embedding(4, 8)
optimizer = torch.optim.SGD(model.parameters())
for n in (2, 3, 4):
    model(torch.zeros(2, n, dtype=torch.int64)).sum().backward()
    optimizer.step()
"""


def test_an_item_of_the_longest_batch_s_length_says_nothing(monkeypatch):
    monkeypatch.setattr(longest, "_steps", lambda timeline: [(n, 10 * n, 5) for n in (2, 3, 4)])
    items = [longest.at_the_longest(SimpleNamespace(recording=SimpleNamespace(longest_item=(n, 7)))) for n in (4, 5)]
    assert items[0] is None and "item 7 of a loader's data has 5: " in items[1]


def test_an_item_as_long_as_the_longest_batch_is_not_worth_a_word(tmp_path):
    assert said(explained(tmp_path / "script.py", TINY))
    assert not said(explained(tmp_path / "script.py", TINY, [("(2, 3, 5)", "(2, 3, 4)")]))
