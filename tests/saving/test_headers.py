"""Rank files whose headers have anything in the place of anything, with hashes that are right: refused by name."""

import json
import math
import shutil

import pytest
from refused_kit import hashed
from saving_kit import BY_ROWS, Holder, alone, differing, few

from refimpl.comm import launch
from refimpl.saving import SavedStateError

FIELDS = "dtype", "shape", "data_offsets"
VALUES = {
    "missing": None, "null": [None], "another type": [{}], "a number": [-1], "negative": [[-1, -1]],
    "NaN": [[math.nan]], "2^63": [[0, 2**63]], "2^62 twice": [[2**62, 2**62]], "nested": "[" * 10**5 + "]" * 10**5,
    "long": ["F" * 10**6], "markup": ["<b>F32"], "control": ["\x1b[2J\u202e"], "another dtype": ["F64"],
    "empty": [[0, 0]]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    launch(lambda comm: Holder(comm, BY_ROWS, tp=2, build=few).train(1).save(folder), 2)
    return folder


def header_with(path, name, field, value):
    """Rewrite a file's header: `value` is [what stands there], the text of it, or None where the field is not there."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header[name][field] = "HERE" if isinstance(value, str) else value[0] if value else None
    if value is None:
        del header[name][field]
    text = json.dumps(header).replace('"HERE"', value if isinstance(value, str) else '"HERE"').encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("field", FIELDS)
def test_each_field_of_a_header(saved, tmp_path, field, value):
    holder = alone(seed=7, build=few).train(2)
    before = holder.state_dict()
    for name in ("rng/cpu", "parameters/up.weight", "optimizer/exp_avg/up.bias", "rest/table"):
        folder = tmp_path / name.replace("/", "-")
        shutil.copytree(saved, folder)
        path = next(folder.glob("step-*/rank-00000*"))
        header_with(path, name, field, VALUES[value])
        hashed(path)
        with pytest.raises(SavedStateError, match="rank-00000.safetensors") as caught:
            holder.load(folder)
        assert str(caught.value).isprintable() and len(str(caught.value)) <= 2003
        assert differing(holder.state_dict(), before) == []
