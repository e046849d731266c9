"""What is not trained: buffers and frozen parameters, whole on every rank or, at stage 3, in shards."""

from ..bucket import Piece


def rest_of(engine):
    """Return {name: tensor} of what is not trained and whole on every rank: frozen parameters, and the buffers that a
    state_dict has."""
    model, kept, in_shards = engine.model, engine.model.state_dict().keys(), frozen_of(engine)
    frozen = {name: p.detach() for name, p in model.named_parameters()
              if p not in engine._bucket_of and name not in in_shards}
    return frozen | {name: buffer for name, buffer in model.named_buffers() if name in kept}


def frozen_of(engine):
    """Return {name: parameter} of frozen parameters that are in shards."""
    return {slot.name: slot.parameter for bucket in engine.frozen_buckets for slot in bucket.slots}


def frozen_pieces(engine):
    """Return [(Piece, flat tensor)] of this rank's shards of frozen parameters."""
    return [(piece, engine.shards[bucket][piece.place : piece.place + piece.end - piece.first])
            for bucket in engine.frozen_buckets for piece in bucket.pieces(engine.comm.rank)]


def rest_targets(engine, rest):
    """Return {name: (Piece, {"frozen": flat tensor})}: the tensors to load this rank's values into. Of a tensor of
    `rest` that is not contiguous it is a copy."""
    whole = {name: (Piece(None, 0, tensor.numel(), 0), {"frozen": tensor.reshape(-1)}) for name, tensor in rest.items()}
    shards = {piece.slot.name: (piece, {"frozen": part}) for piece, part in frozen_pieces(engine)}
    for name in frozen_of(engine).keys() - shards.keys():  # this rank has no part of it
        shards[name] = Piece(None, 0, 0, 0), {}
    return whole | shards
