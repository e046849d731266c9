"""`refimpl rehearse SCRIPT --on h100`: a training script on PyTorch's own allocator, for a GPU that is not there.

Order of reading: `command` (which devices, one process for each, what is printed), `child` (that process: the device
without kernels, then the script for some steps), `values` (what a script may not ask of a device that computes
nothing), `files` (what it may not write).
"""
