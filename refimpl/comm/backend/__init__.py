"""What stands between a Communicator and torch.distributed.

tensors: which tensors gloo and NCCL take. pairwise: collectives as messages. groups: sub-groups. versions: names.
"""
