import itertools
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from refimpl.data import PATTERNS, VOCAB_SIZE, TextData, decode, encode

TEXT = "".join(chr(32 + i % 90) for i in range(1000))


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    """Texts of up to 128 bytes in which byte n is n, so that a token tells where it stands."""
    folder = tmp_path_factory.mktemp("counting")
    def text(length=128):
        path = folder / f"{length}.txt"
        path.write_bytes(bytes(range(length)))
        return TextData(path, validation=0)
    return text


def first_tokens(batches):
    return [row[0] for tokens_BT, _ in batches for row in tokens_BT.tolist()]


def test_the_default_is_english_prose():
    text = TextData(validation=0)
    assert 300_000 < len(text.train) < 1_000_000 and "statement" in decode(text.train)
    assert decode(text.train).startswith('The "assert" statement')  # the first topic in sorted order


def test_train_and_validation_are_bytes(text_file):
    text = TextData(text_file, validation=0.25)
    assert all(split.dtype == torch.uint8 and split.ndim == 1 for split in (text.train, text.validation))
    assert (len(text.train), len(text.validation)) == (750, 250)
    assert decode(text.train) + decode(text.validation) == TEXT
    assert repr(text) == f"TextData({text_file}: 750 bytes of train, 250 bytes of validation)"
    assert len(TextData(text_file, validation=0).validation) == 0


def test_a_path_may_be_a_string(text_file):
    assert torch.equal(TextData(str(text_file)).train, TextData(text_file).train)


def test_a_folder_is_its_matching_files_in_sorted_order(tmp_path):
    (tmp_path / "b").mkdir()
    for name in ("b/two.md", "a.txt", "c.py", "b/one.rst", "notes.bin", "b/empty.txt"):
        (tmp_path / name).write_text("" if "empty" in name else f"[{name}]", encoding="utf-8")
    assert decode(TextData(tmp_path, validation=0).train) == "[a.txt][b/one.rst][b/two.md][c.py]"
    assert decode(TextData(tmp_path, validation=0, patterns=("*.bin",)).train) == "[notes.bin]"
    assert PATTERNS == ("*.txt", "*.md", "*.py", "*.rst")


def test_one_pattern_alone_is_refused(tmp_path):
    """A string is a sequence of letters, and "*" among them would match every file."""
    (tmp_path / "a.txt").write_text("text", encoding="utf-8")
    with pytest.raises(ValueError, match=r"patterns='\*\.txt': expected a sequence of patterns, \('\*\.txt',\)"):
        TextData(tmp_path, patterns="*.txt")
    assert decode(TextData(tmp_path, validation=0, patterns=["*.txt"]).train) == "text"


def test_targets_are_the_tokens_that_follow(text_file):
    for tokens_BT, targets_BT in TextData(text_file, validation=0).batches(4, 16):
        assert tokens_BT.shape == targets_BT.shape == (4, 16) and tokens_BT.dtype == targets_BT.dtype == torch.int64
        assert tokens_BT.is_contiguous() and targets_BT.is_contiguous()
        for row, target in zip(tokens_BT.tolist(), targets_BT.tolist(), strict=True):
            assert row[1:] == target[:-1] and bytes(row + target[-1:]) in TEXT.encode()
        assert tokens_BT.max() < VOCAB_SIZE


@given(length=st.integers(2, 128), sequence_length=st.integers(1, 16), batch_size=st.integers(1, 4),
       world_size=st.integers(1, 4), seed=st.integers(0, 2**31), epochs=st.integers(1, 3))
def test_ranks_share_the_windows(counting, length, sequence_length, batch_size, world_size, seed, epochs):
    """Disjoint, covering but for the incomplete last global batch, and as many batches for every rank."""
    text = counting(length)
    windows, global_batch = (length - 1) // sequence_length, batch_size * world_size
    if windows < global_batch:
        with pytest.raises(ValueError):
            text.batches(batch_size, sequence_length, world_size=world_size)
        return
    steps = text.steps(batch_size, sequence_length, world_size=world_size)
    assert steps == windows // global_batch
    drawn = {"seed": seed, "epochs": epochs}
    by_rank = [list(text.batches(batch_size, sequence_length, rank=rank, world_size=world_size, **drawn))
               for rank in range(world_size)]
    assert {len(batches) for batches in by_rank} == {steps * epochs}
    for epoch in range(epochs):
        seen = sum((first_tokens(batches[epoch * steps : (epoch + 1) * steps]) for batches in by_rank), [])
        assert len(set(seen)) == len(seen) == steps * global_batch  # each window at most once
        assert all(start % sequence_length == 0 for start in seen) and max(seen) + sequence_length < length
    # What one rank would draw with the whole global batch, only dealt out.
    for step, batch in enumerate(text.batches(global_batch, sequence_length, **drawn)):
        for which in (0, 1):
            assert torch.equal(batch[which], torch.cat([batches[step][which] for batches in by_rank]))


def test_an_epoch_visits_every_window_once(counting):
    assert sorted(first_tokens(counting().batches(1, 10))) == list(range(0, 120, 10))
    targets = [token for _, targets_BT in counting().batches(1, 10) for token in targets_BT.flatten().tolist()]
    assert sorted(targets) == list(range(1, 121))  # every byte but the first, and no more than fits


def test_what_one_epoch_drops_another_visits(counting):
    """63 windows, 60 of them an epoch: not always the same three are left out."""
    assert len(set(first_tokens(counting().batches(10, 2, epochs=1)))) == 60
    assert set(first_tokens(counting().batches(10, 2, epochs=20))) == set(range(0, 126, 2))


def test_the_order_comes_from_seed_and_epoch(counting):
    def order(**how):
        return first_tokens(counting().batches(1, 2, **how))

    assert order() == order() != sorted(order())
    assert order(seed=1) != order(seed=0)
    two = order(epochs=2)
    assert two[:63] == order() and two[63:] != two[:63]
    assert sorted(two[63:]) == sorted(two[:63])
    # (seed, epoch) and not their sum: epoch 1 of seed 0 is not epoch 0 of seed 1.
    assert two[63:] != order(seed=1)


def test_no_end_of_epochs(counting):
    steps = counting().steps(4, 2)
    many = list(itertools.islice(counting().batches(4, 2, epochs=None), 10 * steps))
    assert len(many) == 10 * steps
    assert first_tokens(many[: 2 * steps]) == first_tokens(counting().batches(4, 2, epochs=2))


def test_the_validation_split(text_file):
    text = TextData(text_file, validation=0.3)
    assert text.steps(1, 13, split="validation") == 299 // 13
    assert all(decode(tokens_BT[0]) in TEXT[700:] for tokens_BT, _ in text.batches(1, 13, split="validation"))


def test_batches_go_to_the_device(text_file):
    tokens_BT, targets_BT = next(TextData(text_file).batches(2, 8, device="meta"))
    assert tokens_BT.device.type == targets_BT.device.type == "meta"
    assert next(TextData(text_file).batches(2, 8))[0].device.type == "cpu"


@pytest.mark.parametrize("made_inside", [False, True])
def test_a_dry_run_draws_fake_batches(text_file, made_inside):
    text = TextData(text_file)
    with FakeTensorMode():
        if made_inside:
            text = TextData(text_file)
        drawn = list(text.batches(2, 8, epochs=2))
    assert len(drawn) == 2 * text.steps(2, 8)
    for batch in itertools.chain(*drawn):  # tokens, targets
        assert isinstance(batch, FakeTensor) and batch.shape == (2, 8) and batch.dtype == torch.int64


@given(st.text())
def test_decode_undoes_encode(text):
    tokens = encode(text)
    assert tokens.dtype == torch.uint8 and tokens.shape == (len(text.encode()),)
    assert decode(tokens) == decode(tokens.long()) == text


def test_decode_shows_what_is_not_text():
    assert decode(encode("né")[:2]) == "n\ufffd" and decode(torch.tensor([72, 255, 105])) == "H\ufffdi"


def test_decode_refuses_what_is_not_bytes():
    for tokens, message in (([1, 256], "token 256 at position 1 is not a byte: expected 0…255"),
                            ([-1], "token -1 at position 0 is not a byte"),
                            ([[0] * 3] * 2, r"tokens of shape \(2, 3\): expected one sequence \(N,\)")):
        with pytest.raises(ValueError, match=message):
            decode(torch.tensor(tokens))


@pytest.mark.parametrize("validation", [1, 1.0, -0.1, 2, float("nan")])
def test_validation_is_a_fraction(validation):
    with pytest.raises(ValueError, match=rf"validation={validation!r}: expected a fraction in \[0, 1\)"):
        TextData(validation=validation)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"batch_size": 0}, "batch_size=0: expected an integer of at least 1$"),
    ({"batch_size": 2.0}, "batch_size=2.0: expected an integer of at least 1$"),
    ({"sequence_length": 0}, "sequence_length=0: expected an integer of at least 1$"),
    ({"world_size": 0}, "world_size=0: expected an integer of at least 1$"),
    ({"rank": 2, "world_size": 2}, r"rank=2: expected an integer from 0 to 1 \(world_size=2\)"),
    ({"rank": -1}, r"rank=-1: expected an integer from 0 to 0 \(world_size=1\)"),
    ({"seed": -1}, "seed=-1: expected an integer of at least 0"),
    ({"epochs": 0}, "epochs=0: expected an integer of at least 1 or None, to go on for ever"),
    ({"split": "test"}, "split='test': expected 'train' or 'validation'"),
    ({"sequence_length": 900}, "the train split of .*text.txt has 900 bytes, and one sequence of sequence_length=900 "
                               "needs 901: give a longer text, a shorter sequence_length"),
    ({"split": "validation", "sequence_length": 100}, "the validation split of .* has 100 bytes, .* needs 101"),
    ({"batch_size": 30, "sequence_length": 10, "world_size": 3},
     "the train split of .*text.txt has 89 windows of 10 tokens, fewer than one global batch of batch_size=30 times "
     "world_size=3 = 90: lower batch_size or sequence_length, or give a longer text")])
def test_batches_refuses_at_once(text_file, arguments, message):
    """When it is called: the generator that it returns is never asked for a batch here."""
    with pytest.raises(ValueError, match=message):
        TextData(text_file).batches(**{"batch_size": 2, "sequence_length": 8, **arguments})


def test_steps_refuses_what_batches_refuses(text_file):
    for size, length, split, message in ((0, 8, "train", "batch_size=0"), (1, 1000, "train", "needs 1001"),
                                         (1, 8, "validation", "has 0 bytes")):
        with pytest.raises(ValueError, match=message):
            TextData(text_file, validation=0).steps(size, length, split=split)


def test_the_longest_sequence_and_the_largest_batch_that_fit(text_file):
    text = TextData(text_file)
    assert text.steps(1, 899) == text.steps(89, 10) == 1
    tokens_BT, targets_BT = next(text.batches(1, 899))
    assert decode(tokens_BT[0]) == TEXT[:899] and decode(targets_BT[0]) == TEXT[1:900]


def test_an_empty_file(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match=r"empty\.txt is empty: give a file with text in it"):
        TextData(tmp_path / "empty.txt")


def test_a_folder_without_text(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "data.bin").write_bytes(b"not text")
    with pytest.raises(ValueError, match=r"no text in .*: expected a non-empty file below it .* \*\.txt or \*\.md or "):
        TextData(tmp_path)


def test_no_such_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file or folder .*absent\.txt: give a UTF-8 text, a folder"):
        TextData(tmp_path / "absent.txt")


@pytest.mark.parametrize("as_folder", [False, True])
def test_a_file_that_is_not_utf_8(tmp_path, as_folder):
    (tmp_path / "good.txt").write_text("good", encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    words = r"latin\.txt is not UTF-8: byte 0xe9 at offset 3; convert it \(iconv -t UTF-8\) or name another file"
    with pytest.raises(ValueError, match=words):
        TextData(tmp_path if as_folder else tmp_path / "latin.txt")


@pytest.mark.parametrize(("function", "listed"), [("pathlib.Path.read_bytes", False), ("os.scandir", True)])
def test_what_may_not_be_read(monkeypatch, text_file, function, listed):
    """Root reads everything, so taking permissions away would test nothing where the tests run as root."""
    def refuse(*arguments, **keywords):
        raise PermissionError(13, "Permission denied", str(arguments[0]))

    monkeypatch.setattr(function, refuse)
    path = text_file.parent if listed else text_file
    with pytest.raises(PermissionError, match=rf"cannot read {path}: allow it \(chmod u\+r\) or name another file"):
        TextData(path)


@pytest.mark.skipif(sys.platform == "win32", reason="a folder is no file to open there")
def test_other_errors_of_the_system_pass_unchanged(text_file):
    with pytest.raises(NotADirectoryError, match=r"text\.txt/below"):
        TextData(text_file / "below")
