"""What stands between a Communicator and torch.distributed.

tensors: which tensors gloo and NCCL take. buffers: what a collective reads and writes. pairwise, by_host: collectives
as messages. groups: sub-groups. wire, clock: transfers over a link. torch_internals: what has no public name in torch.
"""
