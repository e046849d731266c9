import dataclasses
import pickle
import re
import tomllib
from pathlib import Path

import pytest

from refimpl import catalog

ROOT = Path(__file__).parent.parent
EXACT_COUNTS = {
    "gpt2": 124439808, "gpt2-medium": 354823168, "gpt2-large": 774030080, "gpt2-xl": 1557611200, "llama-7b": 6738415616,
    "llama-13b": 13015864320, "llama-65b": 65285660672, "llama2-7b": 6738415616, "llama2-70b": 68976648192,
    "llama3-405b": 405853388800, "gpt-neox-20b": 20554567680, "llama2-13b": 13015864320, "llama3-8b": 8030261248,
    "llama3-70b": 70553706496, "tinyllama-1.1b": 1100048384, "mistral-7b": 7241732096, "qwen2.5-7b": 7615616512,
    "qwen2.5-72b": 72706203648, "gemma2-9b": 9241705984, "pythia-70m": 70426624, "pythia-160m": 162322944,
    "pythia-410m": 405334016, "pythia-1b": 1011781632, "pythia-1.4b": 1414647808, "pythia-2.8b": 2775208960,
    "pythia-6.9b": 6857302016, "pythia-12b": 11846072320}
NAMED_COUNTS = {
    "gpt3-175b": 175e9, "mt-nlg-530b": 530e9, "korthikanti-22b": 22e9, "korthikanti-175b": 175e9,
    "korthikanti-530b": 530e9, "korthikanti-1t": 1000e9}
FACTS = "micro_batch", "global_batch", "tensor_parallel", "pipeline_parallel", "interleave"
MARKETED_GB = {
    "v100-32": 32, "a100-40": 40, "a100-80": 80, "h100-sxm": 80, "h100-pcie": 80, "h200": 141, "b200": 180,
    "rtx-3090": 24, "rtx-4090": 24, "rtx-5090": 32, "t4": 16, "l4": 24, "a10": 24, "l40s": 48, "mi300x": 192}
# What the driver or the runtime calls the total, from public logs of deviceQuery and nvidia-smi.
REPORTED_BYTES = {
    "v100-32": 34_058_272_768, "a100-40": 42_405_855_232, "a100-80": 85_198_045_184, "h100-sxm": 81_559 * 2**20,
    "h100-pcie": 81_559 * 2**20, "h200": 143_771 * 2**20, "b200": 183_359 * 2**20, "rtx-3090": 24_576 * 2**20,
    "rtx-4090": 24_564 * 2**20, "rtx-5090": 32_607 * 2**20, "t4": 15_360 * 2**20, "l4": 23_034 * 2**20,
    "a10": 23_028 * 2**20, "l40s": 46_068 * 2**20, "mi300x": 206_141_652_992}
SMALL_MODEL = """
[small]
vocab_size = 256
context_length = 64
layers = 2
hidden = 32
heads = 4
source = "a test"
recalled = []
"""
SMALL_HARDWARE = """
[small]
memory_bytes = 1024
memory_bandwidth = 1e9
bf16_flops = 1e12
link_bandwidth = { pcie = 1e9 }
source = "a test"
recalled = []
"""

TWO_PAGES = """
[first]
number = "00"
title = "First"
question = "What comes first?"
minutes = 30
core = true
needs = []

[second]
number = "01"
title = "Second"
question = "What comes then?"
minutes = 45
core = true
needs = ["first"]
"""


def parameter_count(vocab_size, context_length, layers, hidden, heads, kv_heads=None, mlp_hidden=None, norm="layernorm",
                    activation="gelu", positions="learned", bias=True, tied=True, head_dim=None, qkv_bias=False,
                    post_norms=False, **no_parameters):
    """Ψ written out apart from refimpl.model, so that the file and the model cannot be wrong together."""
    head_dim = head_dim or hidden // heads
    q_hidden, kv_hidden = heads * head_dim, head_dim * (kv_heads or heads)
    mlp_hidden = mlp_hidden or 4 * hidden
    qkv_biases = (bias or qkv_bias) * (q_hidden + 2 * kv_hidden)
    attention = 2 * hidden * q_hidden + 2 * hidden * kv_hidden + qkv_biases + bias * hidden
    up = {"gelu": 1, "swiglu": 2, "geglu": 2}[activation]
    mlp = (up + 1) * hidden * mlp_hidden + bias * (up * mlp_hidden + hidden)
    one_norm = hidden * (2 if norm == "layernorm" and bias else 1)
    embeddings = vocab_size * hidden * (1 if tied else 2) + context_length * hidden * (positions == "learned")
    return embeddings + layers * (attention + mlp + (2 + 2 * post_norms) * one_norm) + one_norm


@pytest.fixture
def in_folder(monkeypatch, tmp_path):
    """Write the files in a folder of the test's own, and have the catalog read there."""
    def use(models=None, hardware=None, pages=None):
        for filename, text in {"models.toml": models, "hardware.toml": hardware, "pages.toml": pages}.items():
            if text is not None:
                (tmp_path / filename).write_text(text, encoding="utf-8")
        monkeypatch.setattr(catalog, "FOLDERS", (tmp_path / "missing", tmp_path))
        forget()

    def forget():
        catalog._models.cache_clear()
        catalog._all_hardware.cache_clear()
        catalog._pages.cache_clear()
    yield use
    forget()


@pytest.mark.parametrize("name", EXACT_COUNTS | NAMED_COUNTS)
def test_the_shape_gives_the_published_parameter_count_or_that_in_the_name(name):
    count = EXACT_COUNTS.get(name)
    assert catalog.published_parameters(name) == count
    assert parameter_count(**catalog.model(name)) == (count or pytest.approx(NAMED_COUNTS[name], rel=0.01))


def test_every_model_is_counted():
    assert set(catalog.model_names()) == set(EXACT_COUNTS) | set(NAMED_COUNTS)


def test_megatron_models_follow_megatron_s_formula():
    """Narayanan et al. 2021, equation 2, which leaves out the final LayerNorm's 2h."""
    for name in catalog.model_names():
        if name.startswith(("korthikanti", "mt-nlg")):
            config = catalog.model(name)
            V, s, l, h = (config[key] for key in ("vocab_size", "context_length", "layers", "hidden"))  # noqa: E741
            assert parameter_count(**config) == 12 * l * h * h + 13 * l * h + (V + s) * h + 2 * h
            assert V == 51200  # 50257, padded to a multiple of 128 for each of 8 tensor-parallel ranks


def test_a_model_is_its_config_only():
    gpt2 = {"vocab_size": 50257, "context_length": 1024, "layers": 12, "hidden": 768, "heads": 12}
    assert catalog.model("gpt2") == gpt2
    for name in catalog.model_names():
        assert catalog.model(name).keys() <= catalog.MODEL_CONFIG


def test_a_caller_cannot_change_the_catalog():
    catalog.model("gpt2")["layers"] = 1
    catalog.training("korthikanti-22b")["micro_batch"] = 99
    assert catalog.model("gpt2")["layers"] == 12 and catalog.training("korthikanti-22b")["micro_batch"] == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        catalog.hardware("h200").memory_bytes = 0


def test_every_model_says_where_it_comes_from():
    for name in catalog.model_names():
        assert len(catalog.source(name)) > 20
        assert set(catalog._model(name)["recalled"]) <= catalog.MODEL_CONFIG | {"parameters"}
    assert "Korthikanti" in catalog.source("korthikanti-1t")


@pytest.mark.parametrize(("name", "values"), [
    ("korthikanti-22b", (4, 4, 8, 1, 1)), ("korthikanti-175b", (1, 64, 8, 8, 3)),
    ("korthikanti-530b", (1, 280, 8, 35, 3)), ("korthikanti-1t", (1, 512, 8, 64, 1))])
def test_training_facts(name, values):
    facts = catalog.training(name)
    assert facts == dict(zip(FACTS, values, strict=True))
    assert catalog.model(name)["layers"] % (facts["pipeline_parallel"] * facts["interleave"]) == 0


def test_a_model_without_training_facts():
    with pytest.raises(ValueError, match=r"no training facts for model 'gpt2'; these have some: korthikanti-22b, "):
        catalog.training("gpt2")


@pytest.mark.parametrize("lookup", [catalog.model, catalog.published_parameters, catalog.source, catalog.training])
def test_an_unknown_model_names_the_close_ones(lookup):
    with pytest.raises(ValueError, match=r"unknown model 'GPT2_XL'; close names: gpt2-xl, "):
        lookup("GPT2_XL")


def test_close_names_forgive_case_and_separators():
    for given, name in (("H100_SXM", "h100-sxm"), ("RTX 4090", "rtx-4090")):
        with pytest.raises(ValueError, match=f"unknown hardware '{given}'; close names: {name}"):
            catalog.hardware(given)


def test_an_unknown_name_with_none_close_lists_them_all():
    for kind, first, look_up, names in (("model", "gpt2", catalog.model, catalog.model_names()),
                                        ("hardware", "v100-32", catalog.hardware, catalog.hardware_names())):
        with pytest.raises(ValueError, match=f"unknown {kind} 'zzzz'; known names: {first}, ") as refused:
            look_up("zzzz")
        assert all(name in str(refused.value) for name in names)


def test_hardware_memory_is_the_marketed_number_in_gib():
    assert set(catalog.hardware_names()) == set(MARKETED_GB)
    for name, gigabytes in MARKETED_GB.items():
        assert catalog.hardware(name).memory_bytes == gigabytes * 2**30


@pytest.mark.parametrize(("name", "reported"), REPORTED_BYTES.items())
def test_drivers_report_a_little_less_than_the_catalog(name, reported):
    """The reason for GiB: read as decimal, every one of these cards would have more memory than was sold. Error
    correction takes a sixteenth of GDDR6."""
    gpu = catalog.hardware(name)
    assert gpu.reported_bytes == reported
    assert (0.93 if "Error correction" in gpu.note else 0.985) < reported / gpu.memory_bytes <= 1
    assert reported > MARKETED_GB[name] * 10**9 or "Error correction" in gpu.note


def test_what_a_device_without_a_gpu_is_made_of():
    """An H200's was read on one; elsewhere CUDA's bytes are the driver's, and a context is not known."""
    assert catalog.hardware("h100") is catalog.hardware("h100-sxm") and "h100" not in catalog.hardware_names()
    h200, t4 = catalog.hardware("h200"), catalog.hardware("t4")
    assert (h200.cuda_bytes, h200.context_bytes) == (150_109_880_320, 552_402_944)
    assert (t4.cuda_bytes, t4.context_bytes, t4.capability, t4.processors) == (t4.reported_bytes, 0, (7, 5), 40)
    for name in catalog.hardware_names():
        gpu = catalog.hardware(name)
        assert (gpu.capability is None) == (gpu.processors is None) == (name == "mi300x")
        assert gpu.context_bytes < gpu.cuda_bytes <= gpu.reported_bytes


def test_peaks_are_dense():
    """The figure with 2:4 sparsity, which datasheets print, is twice the dense one."""
    printed_sparse = {
        "a100-40": 624e12, "a100-80": 624e12, "h100-sxm": 1979e12, "h100-pcie": 1513e12, "h200": 1979e12,
        "b200": 4500e12, "rtx-3090": 142e12, "rtx-4090": 330.4e12, "rtx-5090": 419e12, "l4": 242e12, "a10": 250e12,
        "l40s": 724.1e12, "mi300x": 2614.9e12}
    for name, sparse in printed_sparse.items():
        assert catalog.hardware(name).bf16_flops == pytest.approx(sparse / 2, rel=1e-3)


def test_links_are_in_one_direction():
    """The NVLink and PCIe figures that datasheets print are both directions together."""
    printed_both = {
        "v100-32": (300e9, 32e9), "a100-40": (600e9, 64e9), "a100-80": (600e9, 64e9), "h100-sxm": (900e9, 128e9),
        "h100-pcie": (600e9, 128e9), "h200": (900e9, 128e9), "b200": (1800e9, 128e9), "rtx-3090": (112.5e9, 64e9),
        "rtx-4090": (None, 64e9), "rtx-5090": (None, 128e9), "t4": (None, 32e9), "l4": (None, 64e9),
        "a10": (None, 64e9), "l40s": (None, 64e9)}
    for name, (nvlink, pcie) in printed_both.items():
        gpu = catalog.hardware(name)
        assert gpu.nvlink_bandwidth == (nvlink and nvlink / 2) and gpu.pcie_bandwidth == pcie / 2


def test_gpus_before_ampere_have_no_bf16():
    found = {name: catalog.hardware(name).low_precision for name in catalog.hardware_names()}
    assert found == {name: "fp16" if name in ("v100-32", "t4") else "bf16" for name in MARKETED_GB}


def test_the_links_of_amd_are_infinity_fabric():
    gpu = catalog.hardware("mi300x")
    assert (gpu.infinity_fabric_bandwidth, gpu.nvlink_bandwidth) == (7 * 128e9 / 2, None)


def test_hardware_travels_to_another_process():
    for name in catalog.hardware_names():
        gpu = catalog.hardware(name)
        assert gpu.name == name and pickle.loads(pickle.dumps(gpu)) == gpu
        assert gpu.memory_bandwidth > gpu.pcie_bandwidth
        fields = {"memory_bytes", "memory_bandwidth", "bf16_flops", "link_bandwidth.nvlink", "link_bandwidth.pcie"}
        assert set(gpu.recalled) <= fields


def test_the_files_are_parsed_once(in_folder, tmp_path):
    in_folder(SMALL_MODEL, SMALL_HARDWARE)
    assert catalog.model_names() == catalog.hardware_names() == ["small"]
    for filename in ("models.toml", "hardware.toml"):
        (tmp_path / filename).unlink()
    assert catalog.model_names() == catalog.hardware_names() == ["small"]


def test_the_package_s_own_copy_comes_first(monkeypatch, in_folder, tmp_path):
    assert Path(catalog.__file__).parent / "_data" == catalog.FOLDERS[0]
    assert Path(catalog.__file__).parents[1] / "data" == catalog.FOLDERS[1]
    in_folder(SMALL_MODEL)
    inside = tmp_path / "_data"
    inside.mkdir()
    (inside / "models.toml").write_text(SMALL_MODEL.replace("small", "inside"), encoding="utf-8")
    monkeypatch.setattr(catalog, "FOLDERS", (inside, tmp_path))
    assert catalog.model_names() == ["inside"]


def test_no_file_at_all(in_folder, tmp_path):
    in_folder(models=SMALL_MODEL)
    with pytest.raises(FileNotFoundError, match="reinstall refimpl, or restore data/hardware.toml") as missing:
        catalog.hardware_names()
    assert all(str(folder / "hardware.toml") in str(missing.value) for folder in (tmp_path / "missing", tmp_path))


@pytest.mark.parametrize(("old", "new", "message"), [
    ("layers = 2", "layer = 2", "model 'small': unknown key 'layer'; known keys: activation, bias, "),
    ("layers = 2", "", "model 'small': 'layers' is missing"),
    ('source = "a test"', "", "model 'small': 'source' is missing"),
    ('source = "a test"', 'source = " "', "model 'small': 'source' is empty; cite the paper, table or config"),
    ("recalled = []", "", "model 'small': 'recalled' is missing"),
    ("recalled = []", "recalled = []\n[small.training]\nbatch = 1", "model 'small', training: unknown key 'batch'"),
    ("recalled = []", "recalled = []\n[small.training]", "model 'small', training: 'global_batch' is missing"),
    ("layers = 2", "layers = ", "models.toml is not valid TOML: "),
    ("bf16_flops", "fp8_flops", "hardware 'small': unknown key 'fp8_flops'; known keys: bf16_flops, "),
    ("memory_bytes = 1024", "", "hardware 'small': 'memory_bytes' is missing"),
    ('source = "a test"', "", "hardware 'small': 'source' is missing"),
    ('source = "a test"', 'source = ""', "hardware 'small': 'source' is empty"),
    ("recalled = []", "", "hardware 'small': 'recalled' is missing"),
    ("pcie", "pci", "hardware 'small', link_bandwidth: unknown key 'pci'; known keys: infinity_fabric, ")])
def test_a_broken_entry_is_refused(in_folder, old, new, message):
    in_folder(SMALL_MODEL.replace(old, new), SMALL_HARDWARE.replace(old, new))
    look_up = catalog.hardware if message.startswith("hardware") else catalog.model
    with pytest.raises(ValueError, match=message):
        look_up("small")


def test_hardware_that_says_only_what_it_must(in_folder):
    in_folder(hardware=SMALL_HARDWARE)
    gpu = catalog.hardware("small")
    assert (gpu.low_precision, gpu.note, gpu.recalled) == ("bf16", "", ())
    assert (gpu.nvlink_bandwidth, gpu.infinity_fabric_bandwidth, gpu.pcie_bandwidth) == (None, None, 1e9)
    assert gpu.reported_bytes == gpu.memory_bytes == 1024


# --- pages -----------------------------------------------------------------------------------------------------------


def test_a_page_is_found_by_its_slug(in_folder):
    in_folder(pages=TWO_PAGES)
    assert [page.slug for page in catalog.pages()] == ["first", "second"]
    page = catalog.page("second")
    assert page == catalog.Page("second", "01", "Second", "What comes then?", 45, True, ("first",))
    assert (page.name, page.filename) == ("01 · Second", "01_second.ipynb")
    with pytest.raises(ValueError, match="unknown page 'secund'; close names: second"):
        catalog.page("secund")


def test_a_letter_puts_a_page_behind_another(in_folder):
    in_folder(pages=TWO_PAGES.replace('"01"', '"00a"') + TWO_PAGES.partition("[second]")[2].join(("\n[third]", "")))
    assert [page.filename for page in catalog.pages()] == ["00_first.ipynb", "00a_second.ipynb", "01_third.ipynb"]
    assert sorted(page.filename for page in catalog.pages()) == [page.filename for page in catalog.pages()]


@pytest.mark.parametrize(("old", "new", "message"), [
    ('number = "01"', 'number = "1"', "page 'second': number '1'; expected two digits"),
    ('number = "01"', 'number = "00"', "page 'second': number 00 comes after 00, which 'first' has"),
    ('needs = ["first"]', 'needs = ["third"]', "page 'second' needs 'third', which is no page before it"),
    ('needs = ["first"]', 'needs = ["second"]', "page 'second' needs 'second', which is no page before it"),
    ("core = true\nneeds = []", "core = false\nneeds = []", "page 'second' is core and needs 'first', which is not"),
    ("minutes = 45", "", "page 'second': 'minutes' is missing"),
    ("minutes = 45", "minutes = 45\nhours = 1", "page 'second': unknown key 'hours'; known keys: core, minutes, ")])
def test_a_table_of_pages_that_is_wrong_is_told_where(in_folder, old, new, message):
    in_folder(pages=TWO_PAGES.replace(old, new))
    with pytest.raises(ValueError, match=re.escape(message)):
        catalog.pages()


def test_the_course_is_whole_without_its_elective_pages():
    core = [page for page in catalog.pages() if page.core]
    assert 12 <= len(core) <= 14 and all(page.minutes % 5 == 0 and 10 <= page.minutes <= 70 for page in catalog.pages())
    assert all(page.question.endswith("?") for page in catalog.pages())


def test_what_the_wheel_carries_is_all_that_is_read():
    carried = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    read = set(re.findall(r'_read\("(\w+\.toml)"\)', (ROOT / "refimpl" / "catalog.py").read_text()))
    assert carried["force-include"] == {f"data/{name}": f"refimpl/_data/{name}" for name in read}
