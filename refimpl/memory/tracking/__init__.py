"""What the tracker stands on: which storages live, which tensors are in a thing, and what PyTorch tells listeners."""
