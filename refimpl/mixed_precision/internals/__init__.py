"""What `autocast` and MixedPrecisionOptimizer stand on: the tables of operations, the kernels that read them, the state
of a thread, and checks of what was asked for."""
