"""The tracker's machinery: which storages live, whose they are, which line made them, and PyTorch's hooks."""
