"""A script under the recorder: it runs as Python would run it, ends after k steps, and fails as it would."""

import sys
import textwrap
from pathlib import Path

import pytest
from explain_kit import helps_of

import refimpl
from refimpl.explain import Explanation, Script, recorder, run
from refimpl.explain.recorded_timeline import RecordedTimeline
from refimpl.explain.steps import PATIENCE

OURS = str(Path(refimpl.__file__).parent)  # no line of ours is in a script's traceback
MODEL = """
import sys, torch
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
optimizer = torch.optim.Adam(model.parameters())
def step(optimizer=optimizer):
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def ran(tmp_path):
    def ran(text, *arguments, steps=2, **options):
        path = tmp_path / "train.py"
        path.write_text(MODEL + textwrap.dedent(text))
        return run(Script(path, arguments), steps, **options)
    return ran


def test_three_steps_are_run_unless_told_otherwise(tmp_path):
    (tmp_path / "train.py").write_text(MODEL + "for _ in range(9): step()")
    made = run(Script(tmp_path / "train.py"))
    assert (made.by_class, made.limit, len(made.recording.steps)) == ({"Adam": 3}, 3, 3)


@pytest.fixture
def helped(ran):
    return lambda text, **options: helps_of(RecordedTimeline(ran(text, **options).recording))


def test_it_is_main_with_its_own_arguments_and_ends_with_finally(ran, capsys):
    made = ran("""
        import pickle, pathlib
        class Own: pass
        assert __name__ == "__main__" and sys.argv[1:] == ["--rows", "3"] and pickle.dumps(Own())
        assert sys.path[0] == str(pathlib.Path(__file__).resolve().parent)
        try:
            for i in range(9):
                try:
                    step()
                except Exception:
                    print("swallowed")
                print("after", i)
        finally:
            print("finally")
        """, "--rows", "3")
    assert capsys.readouterr().out.split() == ["after", "0", "finally"]
    assert made.done and made.status == 0 and made.words == "2 steps of Adam, then ended"
    assert made.recording.steps[-1] == len(made.recording.trace.ops)
    assert not hasattr(sys, "argv") or sys.argv[1:] != ["--rows", "3"]


@pytest.mark.parametrize(("text", "status", "words"), [
    ("step(); sys.exit(3)", 3, "exited with status 3, after 1 step of Adam (2 were asked for)"),
    ("sys.exit('no data')", 1, "exited with status 1, after no optimizer step"),
    ("step()", 0, "ended by itself, after 1 step of Adam (2 were asked for)"),
    ("step(); model(torch.randn(4, 5))", 1, "failed: RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    ("def f(:", 1, "failed: SyntaxError"),
    ("step(); raise KeyboardInterrupt", 130, "was interrupted, after 1 step of Adam")])
def test_what_does_not_come_to_its_steps_keeps_its_status(ran, capsys, text, status, words):
    made = ran(text)
    assert made.status == status and not made.done and made.words.startswith(words)
    errors = capsys.readouterr().err
    assert errors == made.ending.text and OURS not in errors
    if "failed: Runtime" in words:
        assert "train.py" in errors and "model(torch.randn(4, 5))" in errors
    if "1 step" in words:
        assert "optimizer state" in str(Explanation(made)), "the ledger so far"


@pytest.mark.parametrize(("error", "words"), [
    ("ValueError('\\n\\n  what it is\\nand more\\n')", "ValueError: what it is"), ("KeyError('x')", "KeyError: 'x'"),
    ("torch.OutOfMemoryError('none left.')", "torch.OutOfMemoryError: none left"), ("OSError()", "OSError")])
def test_a_failure_is_said_by_its_type_and_its_first_line(ran, error, words):
    assert ran(f"raise {error}").words == f"failed: {words}, after no optimizer step"


def test_no_training_is_said(ran):
    said = str(Explanation(ran("with torch.no_grad(): model(torch.randn(2, 16))")))
    assert "no optimizer made a step here" in said and "parameters" in said and "would help" not in said


def test_a_compiled_model_runs_as_such(ran):
    made = ran("""
        compiled = torch.compile(torch.nn.Sequential(model, torch.nn.ReLU()), backend="eager")
        for _ in range(5):
            compiled(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
        """)
    assert made.done and made.by_class == {"Adam": 2}, made.ending.text
    parameters = made.recording.models[0].parameters
    assert sum(count for _, count, _, is_trained in parameters if is_trained) == 2 * 16 * 64 + 80


def test_two_optimizers_have_to_make_their_steps_and_forked_ones_do_not_count(ran):
    made = ran("""
        import os
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        child = os.fork()
        if not child:
            for _ in range(5): step()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        for _ in range(5): step(); step(other)
        """)
    assert made.done and made.by_class == {"Adam": 2, "SGD": 2} and len(made.recording.steps) == 4


def test_an_optimizer_that_was_given_up_or_let_go_is_not_waited_for(ran):
    made = ran("""
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        warm = torch.optim.RMSprop(model.parameters())
        step(warm)
        for i in range(300): step()
        """)
    assert made.done and made.by_class == {"SGD": 1, "RMSprop": 1, "Adam": 4}


def test_a_step_may_have_a_closure(ran):
    made = ran("""
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
        def closure():
            optimizer.zero_grad()
            loss = model(torch.randn(4, 16)).square().mean()
            loss.backward()
            return loss
        for _ in range(5): optimizer.step(closure)
        """)
    assert made.done and made.by_class == {"LBFGS": 2}, made.ending.text


def test_a_fault_of_ours_keeps_our_frames(ran, monkeypatch):
    monkeypatch.setattr(recorder.ModelFacts, "of", lambda *_: recorder.bisect_left(None, 1))
    made = ran("step()")
    assert OURS in made.ending.text and "TypeError" in made.words


@pytest.mark.parametrize("where", ["around", "inside"])
def test_a_script_may_profile_itself(ran, where):
    made = ran("""
        from contextlib import nullcontext
        from torch.profiler import profile
        around, inside = (profile(), nullcontext()) if "around" in sys.argv else (nullcontext(), profile())
        with around:
            step()
            with inside: step()
        """, where, steps=3)
    assert made.status == 0 and made.by_class == {"Adam": 2}, made.ending.text


def test_one_that_catches_the_end_is_ended_all_the_same(ran, monkeypatch):
    class Ended(BaseException):
        pass
    def end(status):
        raise Ended
    monkeypatch.setattr("os._exit", end)
    monkeypatch.setattr("atexit._run_exitfuncs", lambda: None)
    reports = []
    ran("""
        while True:
            try: step()
            except BaseException as error:
                if type(error).__name__ == "Ended": break
        """, report=reports.append)
    assert reports[0].caught == PATIENCE and reports[0].status == 0 and "caught the end" in reports[0].words
    assert reports[0].recording.steps[-1] == len(reports[0].recording.trace.ops), "what follows is no part of it"


def test_gradients_kept_and_losses_kept_are_named(helped):
    found = helped("""
        kept = []
        for _ in range(4):
            kept.append(model(torch.randn(4096, 16)).sum())
            step()
        """, steps=3)
    assert found["no_grad"].saves >= 2 * 4096 * 64 * 4, "two graphs without a backward"


@pytest.mark.parametrize(("text", "terms", "counters"), [
    ("optimizer", "16 bytes × 2,128 parameters", 4 * 4),
    ("torch.optim.Adafactor(model.parameters())", "8 bytes × 2,128 parameters + 960 bytes of optimizer state", 4 * 4),
    ("torch.optim.Adam(model[0].parameters())", "8 bytes × 2,128 parameters + 8,704 bytes of optimizer state", 2 * 4)])
def test_optimizer_state_that_is_not_as_much_for_each_parameter_is_no_rounded_share(ran, text, terms, counters):
    made = ran(f"""
        optimizer = {text}
        while True: step(optimizer)
        """)
    found = Explanation(made).arithmetic
    assert found.terms == terms and [(name, nbytes) for name, nbytes in found.rest if "state" in name] == [
        ("optimizer state beyond that: counters", counters)]


def test_graphs_that_outlive_their_backward_had_one(helped):
    found = helped("""
        while True:
            model(torch.randn(4096, 16)).square().mean().backward(retain_graph=True)
            optimizer.step()
        """)
    assert found["no_grad"].saves == 0 and found["no_grad"].why == "every forward here has its backward"
    for name in ("bf16", "int8", "masks", "host"):
        assert found[name].saves == 0 and "retain_graph=True" in found[name].why


def test_no_rows_are_taken_where_the_sequence_comes_first(helped):
    """Cut in its first dimension, a batch of an LSTM loses its past. The same net with batch_first has rows."""
    said = {first: helped(f"""
        net = torch.nn.LSTM(16, 16, batch_first={first})
        optimizer = torch.optim.SGD(net.parameters())
        for _ in range(4):
            net(torch.randn(32, 4, 16))[0].sum().backward()
            optimizer.step()
        """) for first in (True, False)}
    assert said[True]["rows"].saves > said[True]["accumulate"].saves > 0
    for name in ("rows", "accumulate"):
        assert said[False][name].saves == 0 and "the sequence first (batch_first=False)" in said[False][name].why


def test_one_row_is_not_given_to_several_ranks(helped):
    found = helped("""
        for _ in range(3):
            model(torch.randn(1, 16)).sum().backward()
            optimizer.step()
        """)["data"]
    assert found.saves == 0 and found.why == "the batch has one row"


@pytest.mark.parametrize("other", ["steps later", "updates copies", "steps, too"])
def test_parameters_that_no_optimizer_has_updated_are_named(ran, other):
    """A GAN's generator may step after k steps of the discriminator. Masters are not known to be whose they are."""
    made = ran(f"""
        second, how = torch.nn.Linear(16, 16), {other!r}
        late = torch.optim.SGD(second.parameters())
        masters = [p.detach().clone().requires_grad_() for p in second.parameters()]
        copies = torch.optim.SGD(masters)
        for i in range(9):
            model(second(torch.randn(4, 16))).square().mean().backward()
            if how == "updates copies":
                for p, q in zip(masters, second.parameters()):
                    p.grad = q.grad
                copies.step()
            if i > 5 or how == "steps, too":
                late.step()
            optimizer.step()
        """)
    assert made.done
    named = [note for note in Explanation(made).notes if "272 parameters want gradients" in note]
    assert len(named) == (other == "steps later")


@pytest.mark.parametrize("late", ["optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)", ""])
def test_gradients_that_are_dropped_between_forward_and_backward_are_there_in_forward(ran, late):
    """As many loops have it: forward, zero_grad, backward, step. The peak is what a metric takes before backward."""
    program = f"""
        for _ in range(4):
            {"optimizer.zero_grad()" if not late else "pass"}
            loss = model(torch.randn(48, 16)).square().mean()
            torch.zeros(100_000).sum()
            {late or "pass"}
            loss.backward()
            optimizer.step()
        """
    timeline = RecordedTimeline(ran(program).recording)
    found = helps_of(timeline)["none"]
    saved = timeline.peak - RecordedTimeline(ran(program, switch="none").recording).peak
    assert saved == found.saves == (4 * (2 * 16 * 64 + 64 + 16) if late else 0)
    assert found.bound if late else "already" in found.why
