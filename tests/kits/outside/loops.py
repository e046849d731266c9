"""Training loops around a model that is given: a hand-written one in the usual variants, Accelerate's, and Trainer."""

import random
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial, wraps

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.optim import SGD, AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


@dataclass
class Program:
    """One whole training step is `function(*given)`, and so is `step()`. It returns tensors to compare. `given`:
    models, optimizers and batches, as for `memory.dry_run(function, *given)`."""

    function: Callable
    given: tuple

    def step(self):
        return self.function(*self.given)

    @property
    def objects(self):
        """Return the models and optimizers, as for `memory.track(*objects)`."""
        return [thing for thing in self.given if isinstance(thing, (torch.nn.Module, torch.optim.Optimizer))]


adamw = partial(AdamW, lr=1e-3)
fused, foreach, for_loop = (partial(adamw, **how) for how in ({"fused": True}, {"foreach": True}, {"foreach": False}))
momentum = partial(SGD, lr=1e-2, momentum=0.9)


def adafactor(parameters):
    import transformers

    return transformers.Adafactor(parameters, lr=1e-3, relative_step=False, scale_parameter=False)


lbfgs = partial(torch.optim.LBFGS, max_iter=2, history_size=2)


def muon(parameters):
    """Muon on the matrices alone; it takes no others."""
    return torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=1e-3)


def seed(number):
    torch.manual_seed(number)
    np.random.seed(number)  # noqa: NPY002 - the one that models draw from
    random.seed(number)


def loop(build):
    """Decorate a function that builds a Program: a call returns a builder, which begins each time from the same random
    numbers and with nothing left by another."""
    def later(*args, **how):
        def again():
            seed(0)
            AcceleratorState._reset_state(reset_partial_state=True)  # or a Trainer's precision stays in it
            GradientState._reset_state()
            return build(*args, **how)
        return again
    return wraps(build)(later)


def results(model, losses):
    """What two runs of the same step have in common to the bit: the losses, and sums of some parameters."""
    parameters = [p.detach() for p in model.parameters() if p.requires_grad]
    return [*losses, *(p.sum() for p in (parameters[0], parameters[len(parameters) // 2], parameters[-1]))]


@loop
def plain(model, batch, optimizer=adamw, micro_batches=1, clip=None, autocast=False, around=nullcontext):
    """The loop that everyone writes. `around`: the context of its forward."""
    def step(net, opt, batches):
        losses = []
        for inputs in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast), around():
                loss = net(**inputs)["loss"] / micro_batches
            loss.backward()
            losses.append(loss.detach())
        if clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        opt.step()
        opt.zero_grad()
        return results(net, losses)
    net, batches = model(), [batch() for _ in range(micro_batches)]
    return Program(step, (net, optimizer(p for p in net.parameters() if p.requires_grad), batches))


@loop
def with_closure(model, batch, optimizer=lbfgs):
    """A loop whose optimizer calls the model itself."""
    def step(net, opt, inputs):
        def closure():
            opt.zero_grad()
            loss = net(**inputs)["loss"]
            loss.backward()
            return loss
        loss = opt.step(closure)
        opt.zero_grad()
        return results(net, [loss.detach()])
    net, inputs = model(), batch()
    return Program(step, (net, optimizer(net.parameters()), inputs))


@loop
def stepping_in_backward(model, batch, optimizer=momentum):
    """A loop in which each parameter is updated, and its gradient freed, as soon as it is there."""
    def step(net, inputs, *optimizers):
        loss = net(**inputs)["loss"]
        loss.backward()
        return results(net, [loss.detach()])
    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()
    net, inputs = model(), batch()
    optimizers = {p: optimizer([p]) for p in net.parameters()}
    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)
    return Program(step, (net, inputs, *optimizers.values()))


@loop
def with_penalty(model, batch, optimizer=adamw):
    """A loop whose loss has the norm of a gradient in it: backward is differentiated."""
    def step(net, opt, inputs):
        pixels = inputs["pixel_values"].clone().requires_grad_()
        loss = net(**{**inputs, "pixel_values": pixels})["loss"]
        (slope,) = torch.autograd.grad(loss, pixels, create_graph=True)
        loss = loss + slope.square().sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return results(net, [loss.detach()])
    net, inputs = model(), batch()
    return Program(step, (net, optimizer(net.parameters()), inputs))


@loop
def averaged(model, batch, optimizer=adamw):
    """A loop that keeps a moving average of the model's parameters."""
    def step(net, opt, average, inputs):
        loss = net(**inputs)["loss"]
        loss.backward()
        opt.step()
        opt.zero_grad()
        average.update_parameters(net)
        return results(average, [loss.detach()])
    net, inputs = model(), batch()
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return Program(step, (net, optimizer(net.parameters()), average, inputs))


@loop
def accelerated(model, batch, optimizer=adamw, micro_batches=2):
    """Accelerate's loop, with its gradient accumulation and clipping."""
    def step(accelerator, net, opt, batches):
        losses = []
        for inputs in batches:
            with accelerator.accumulate(net):
                loss = net(**inputs)["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 1.0)
                opt.step()
                opt.zero_grad()
                losses.append(loss.detach())
        return results(net, losses)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro_batches)
    net, batches = model(), [batch() for _ in range(micro_batches)]
    net, opt = accelerator.prepare(net, optimizer(net.parameters()))
    return Program(partial(step, accelerator), (net, opt, batches))


@loop
def trained(model, batch, optimizer=adamw, **arguments):
    """Transformers' Trainer: its step is a `train()` of two of its steps, from the data loader to the schedule of the
    learning rate. Without `optimizer` it makes its own, each time."""
    def step(net, opt, inputs):
        rows = [dict(zip(inputs, row, strict=True)) for row in zip(*inputs.values(), strict=True)]
        schedule = opt and torch.optim.lr_scheduler.LambdaLR(opt, lambda done: 1 / (1 + done))
        with tempfile.TemporaryDirectory() as folder:
            import transformers

            settings = transformers.TrainingArguments(
                folder, max_steps=2, per_device_train_batch_size=len(rows) // 2, use_cpu=True, report_to=[],
                save_strategy="no", logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, **arguments)
            trainer = transformers.Trainer(net, settings, train_dataset=rows, optimizers=(opt, schedule))
            trainer.remove_callback(transformers.PrinterCallback)
            loss = trainer.train().training_loss
        return results(net, [torch.tensor(loss)])
    net, inputs = model(), batch()
    return Program(step, (net, optimizer and optimizer(net.parameters()), inputs))
