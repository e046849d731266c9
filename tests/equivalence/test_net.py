"""Every causal language model of transformers, cut in each way: equal to the whole, or refused, as the page says."""

import logging

import pytest
import transformers
from net_kit import CLASSES, COLUMNS, PAGE, row_of, rows_of_page

ROWS = rows_of_page()
CORE = ("llama", "gpt2", "gemma3_text", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "phi3", "granite", "zamba2")


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.skipif(transformers.__version__ not in PAGE.read_text(), reason="the page is of another transformers")
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.filterwarnings("ignore")
def test_each_kind_is_equal_to_the_whole_or_refused(kind):
    found = row_of(kind)
    assert found == ROWS.get(kind), dict(zip(COLUMNS, found or (), strict=False))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", CORE)
def test_kinds_that_many_train_are_cut_as_the_page_says(kind):
    assert row_of(kind) == ROWS[kind]


def test_the_page_counts_what_it_lists():
    counts = [f"{name} {sum(row[i].startswith('yes') for row in ROWS.values())}" for i, name in enumerate(COLUMNS)]
    assert ", ".join(counts) + f" of {len(ROWS)}" in PAGE.read_text() and len(ROWS) > 150
