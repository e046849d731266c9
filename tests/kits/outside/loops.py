"""Training loops around a model that is given: a hand-written one in the usual variants, Accelerate's, and Trainer."""

import random
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.optim import SGD, AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


@dataclass
class Program:
    """`step()` runs one whole training step and returns tensors to compare; `objects` is for `memory.track`."""

    step: Callable[[], list]
    objects: list = field(default_factory=list)


adamw = partial(AdamW, lr=1e-3)
fused, foreach, for_loop = (partial(adamw, **how) for how in ({"fused": True}, {"foreach": True}, {"foreach": False}))
momentum = partial(SGD, lr=1e-2, momentum=0.9)
adafactor = partial(transformers.Adafactor, lr=1e-3, relative_step=False, scale_parameter=False)
lbfgs = partial(torch.optim.LBFGS, max_iter=2, history_size=2)


def muon(parameters):
    """Muon on the matrices alone; it takes no others."""
    return torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=1e-3)


def seeded(build):
    """Return `build`, each call of which begins from the same random numbers and with nothing left by another."""

    def again():
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002 - the one that models draw from
        random.seed(0)
        AcceleratorState._reset_state(reset_partial_state=True)  # one per process: a Trainer's precision stays in it
        GradientState._reset_state()
        return build()

    return again


def results(model, losses):
    """What two runs of the same step have in common to the bit: the losses, and sums of some parameters."""
    parameters = [p.detach() for p in model.parameters() if p.requires_grad]
    return [*losses, *(p.sum() for p in (parameters[0], parameters[len(parameters) // 2], parameters[-1]))]


def plain(model, batch, optimizer=adamw, micro_batches=1, clip=None, autocast=False, around=nullcontext):
    """Return a builder of the loop that everyone writes. `around`: the context of its forward."""

    def build():
        net, micro = model(), [batch() for _ in range(micro_batches)]
        opt = optimizer(p for p in net.parameters() if p.requires_grad)

        def step():
            losses = []
            for inputs in micro:
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast), around():
                    loss = net(**inputs)["loss"] / micro_batches
                loss.backward()
                losses.append(loss.detach())
            if clip:
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            opt.step()
            opt.zero_grad()
            return results(net, losses)

        return Program(step, [net, opt])

    return seeded(build)


def with_closure(model, batch, optimizer=lbfgs):
    """Return a builder of a loop whose optimizer calls the model itself."""

    def build():
        net, inputs = model(), batch()
        opt = optimizer(net.parameters())

        def closure():
            opt.zero_grad()
            loss = net(**inputs)["loss"]
            loss.backward()
            return loss

        def step():
            loss = opt.step(closure)
            opt.zero_grad()
            return results(net, [loss.detach()])

        return Program(step, [net, opt])

    return seeded(build)


def stepping_in_backward(model, batch, optimizer=momentum):
    """Return a builder of a loop in which each parameter is updated, and its gradient freed, as soon as it is there."""

    def build():
        net, inputs = model(), batch()
        optimizers = {p: optimizer([p]) for p in net.parameters()}

        def update(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(update)

        def step():
            loss = net(**inputs)["loss"]
            loss.backward()
            return results(net, [loss.detach()])

        return Program(step, [net, *optimizers.values()])

    return seeded(build)


def with_penalty(model, batch, optimizer=adamw):
    """Return a builder of a loop whose loss has the norm of a gradient in it: backward is differentiated."""

    def build():
        net, inputs = model(), batch()
        opt = optimizer(net.parameters())
        (name, picture) = next(iter(inputs.items()))

        def step():
            leaf = picture.clone().requires_grad_()
            loss = net(**{**inputs, name: leaf})["loss"]
            (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)
            loss = loss + slope.square().sum()
            loss.backward()
            opt.step()
            opt.zero_grad()
            return results(net, [loss.detach()])

        return Program(step, [net, opt])

    return seeded(build)


def averaged(model, batch, optimizer=adamw):
    """Return a builder of a loop that keeps a moving average of the model's parameters."""

    def build():
        net, inputs = model(), batch()
        opt, average = optimizer(net.parameters()), AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))

        def step():
            loss = net(**inputs)["loss"]
            loss.backward()
            opt.step()
            opt.zero_grad()
            average.update_parameters(net)
            return results(average, [loss.detach()])

        return Program(step, [net, opt, average])

    return seeded(build)


def accelerated(model, batch, optimizer=adamw, micro_batches=2):
    """Return a builder of Accelerate's loop, with its gradient accumulation and clipping."""

    def build():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro_batches)
        net, micro = model(), [batch() for _ in range(micro_batches)]
        net, opt = accelerator.prepare(net, optimizer(net.parameters()))

        def step():
            losses = []
            for inputs in micro:
                with accelerator.accumulate(net):
                    loss = net(**inputs)["loss"]
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(net.parameters(), 1.0)
                    opt.step()
                    opt.zero_grad()
                    losses.append(loss.detach())
            return results(net, losses)

        return Program(step, [net, opt.optimizer])

    return seeded(build)


def trained(model, batch, optimizer=adamw, **arguments):
    """Return a builder of transformers' Trainer: its step is a `train()` of two of its steps, from the data loader to
    the schedule of the learning rate. Without `optimizer` it makes its own, each time."""

    def build():
        net, inputs = model(), batch()
        rows = [dict(zip(inputs, row, strict=True)) for row in zip(*inputs.values(), strict=True)]
        opt = optimizer and optimizer(net.parameters())

        def step():
            with tempfile.TemporaryDirectory() as folder:
                settings = transformers.TrainingArguments(
                    folder, max_steps=2, per_device_train_batch_size=len(rows) // 2, use_cpu=True, report_to=[],
                    save_strategy="no", logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
                    **arguments)
                schedule = opt and torch.optim.lr_scheduler.LambdaLR(opt, lambda done: 1 / (1 + done))
                trainer = transformers.Trainer(net, settings, train_dataset=rows, optimizers=(opt, schedule))
                trainer.remove_callback(transformers.PrinterCallback)
                loss = trainer.train().training_loss
            return results(net, [torch.tensor(loss)])

        return Program(step, [net, opt] if opt else [net])

    return seeded(build)
