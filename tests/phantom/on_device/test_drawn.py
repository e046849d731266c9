"""Drawn programs on PyTorch's own allocator are replayed: each address, each segment."""

import json
import subprocess
import sys

import drawn
import pytest
import torch

from refimpl.allocator import Settings, Snapshot, compare

PROGRAMS = 30  # for each of the settings
SETTINGS = ["", "expandable_segments:True", "max_split_size_mb:32", "roundup_power2_divisions:8",
            "garbage_collection_threshold:0.6", "max_split_size_mb:48,roundup_power2_divisions:[1:4,>:0]",
            "expandable_segments:True,garbage_collection_threshold:0.5",
            "max_non_split_rounding_mb:64,max_split_size_mb:64,pinned_use_cuda_host_register:True"]


@pytest.mark.parametrize("text", SETTINGS)
def test_every_address_and_every_segment_of_drawn_programs(text, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", text)
    subprocess.run([sys.executable, drawn.__file__, tmp_path, "0", str(PROGRAMS)], check=True)
    addresses, wrong = 0, {}
    for seed in range(PROGRAMS):
        facts = json.loads((tmp_path / f"{seed}.json").read_text())
        snapshot = Snapshot.load(tmp_path / f"{seed}.pickle")
        settings = Settings.of(snapshot, version=torch.__version__, memory_fraction=facts["fraction"])
        found = compare(snapshot, settings, capacity=facts["total"])
        addresses += found.addresses
        if found.difference is not None:
            wrong[seed] = repr(found)
    assert not wrong and addresses > 50 * PROGRAMS, wrong


@pytest.mark.parametrize("text", ["max_split_size_mb:19", "max_non_split_rounding_mb:5", "large_segment_size_mb:5",
                                  "garbage_collection_threshold:1.5", "per_process_memory_fraction:2",
                                  "expandable_segments:yes", "roundup_power2_divisions:3"])
def test_a_setting_that_pytorch_refuses_is_refused_in_its_words(text):
    with pytest.raises(Exception) as theirs:
        torch._C._accelerator_setAllocatorSettings(text)
    with pytest.raises(ValueError, match="PyTorch refuses it: ") as ours:
        Settings.parse(text)
    said = str(ours.value).partition("PyTorch refuses it: ")[2]
    assert said.partition(" in ConfigTokenizer")[0] in str(theirs.value)
