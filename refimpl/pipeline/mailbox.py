"""A rank's messages of one step: makes room for them, sends them, frees them; learns their shapes in a first step.

A tensor without elements says a shape alone: it is described, and never sent.
"""

from types import SimpleNamespace

import torch

from ..common.marks import mark

HEADER = 64  # int64 numbers
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
          torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128)


def header_of(shapes, message):
    """Put a description of tensors in HEADER numbers: of each its dtype, whether it needs a gradient, and its shape.

    ValueError, with the message, if there are too many.
    """
    numbers = [len(shapes)]
    for dtype, needs_gradient, shape in shapes:
        numbers += [DTYPES.index(dtype), int(needs_gradient), len(shape), *shape]
    if len(numbers) > HEADER:
        raise ValueError(f"{message}: {len(shapes)} tensors are too many to describe in {HEADER} numbers; expected a "
                         "stage to pass on fewer, stacked")
    return torch.tensor(numbers + [0] * (HEADER - len(numbers)))


def described(header):
    """Return the description that a header holds: [(dtype, whether it needs a gradient, shape) of each tensor]."""
    count, *numbers = header.tolist()
    found = []
    for _ in range(count):
        dtype, needs_gradient, dims, *numbers = numbers
        found.append((DTYPES[dtype], bool(needs_gradient), tuple(numbers[:dims])))
        numbers = numbers[dims:]
    return found


class Mailbox:
    """Sends and receives the messages of one step, around the Turns of `messages.route`.

    `shapes`: {(stage, micro-batch): the description of the activation that this stage receives}. A first step fills it:
    there a header announces each activation, a rank makes room only for what it needs at once, and keeps what it sends
    until the end of the step. `known`: this is a later step with the same shapes. `device`: of the stages; messages
    go through the memory of `comm.device`.
    """

    def __init__(self, comm, shapes, known, device):
        self.comm, self.shapes, self.known, self.device = comm, shapes, known, device
        self._announced = {}  # source -> messages to make room for, in order of receipt
        self._coming, self._leaving = {}, {}  # message -> Handles; tensors, of what was handed over

    def receive(self, turn):
        """Return what an instruction needs, as a list of tensors, after it has arrived; None if it needs nothing."""
        for source, message in turn.room:
            self._announced.setdefault(source, []).append(message)
        for source, messages in self._announced.items():
            while messages and (self.known or source == turn.source and turn.needs in messages):
                self._make_room(messages.pop(0), source)
        tensors = None
        if turn.needs is not None:
            coming = self._coming.pop(turn.needs)
            tensors = coming if turn.source == self.comm.rank else [
                each.wait().to(self.device) for each in coming]
        for message in turn.left if self.known else ():
            self._wait_until_left(message)
        return tensors

    def send(self, turn, tensors):
        """Send what an instruction has made: a list of tensors."""
        message, target = turn.makes, turn.target
        if message.kind == "activation":
            self.shapes[message[1:]] = [(x.dtype, x.requires_grad, tuple(x.shape)) for x in tensors]
        if target == self.comm.rank:
            self._coming[message] = tensors  # to this rank itself: handed over, uncopied
            return
        tensors = [mark(x.detach().to(self.comm.device), "communication") for x in tensors]  # with NCCL, on the host
        if message.kind == "activation" and not self.known:
            # First: the receiver does not know how much room it takes.
            tensors.insert(0, mark(header_of(self.shapes[message[1:]], message), "communication"))
        self._leaving[message] = [self.comm.send(x, target, async_op=True, label=str(message))
                                  for x in tensors if x.numel()]

    def finish(self):
        """Wait until all that was sent has left."""
        for message in list(self._leaving):
            self._wait_until_left(message)

    def _wait_until_left(self, message):
        for handle in self._leaving.pop(message):
            handle.wait()

    def _make_room(self, message, source):
        place = message[1:]
        if message.kind == "activation" and not self.known:
            room = mark(torch.empty(HEADER, dtype=torch.int64), "communication")
            self.shapes[place] = described(self.comm.recv(room, source))
        shapes = self.shapes[place if message.kind == "activation" else (message.stage + 1, message.micro_batch)]
        rooms = [torch.empty(shape, dtype=dtype, device=self.comm.device) for dtype, needs_gradient, shape in shapes
                 if needs_gradient or message.kind == "activation"]
        self._coming[message] = [self._received(room, source, message) for room in rooms]

    def _received(self, room, source, message):
        if not room.numel():
            return SimpleNamespace(wait=lambda: room)
        return self.comm.recv(room, source, out=mark(room, "communication"), async_op=True, label=str(message))
