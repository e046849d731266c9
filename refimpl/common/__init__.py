"""What techniques and meters both stand on, so that neither needs the other to be read or loaded.

    ledger             the categories of bytes, and tables of them
    marks              a technique gives a tensor a category; a meter subscribes
    spans              what a rank does, and what goes on meanwhile
    nested_tensors     the tensors in lists, tuples and dicts, and whether a tensor is of a dry run
    rerun              a function that is run again
    keyword_options    options that a technique does not have are refused
    derivatives        transforms of torch.func that are refused
    activation_bytes, state_bytes, step_bytes, cache_bytes    the closed forms of a model, its states, a step, a cache

And what two techniques need, and may not ask of each other:

    allocations, lifetimes    which bytes were asked for and freed, in order; born and freed, as intervals
    materializing      how a model on the meta device gets its values
    attention_pair     an attention in two functions, forward and backward
    autocast_keys      the dispatch keys at which two packages listen to autocast
    accesses, eviction what is needed next, and what is evicted when memory is short: Belady's rule and LRU
    quadratic          bytes as a polynomial of a size, from three readings
    compiling, interpreter    a C++ kernel, compiled once and kept; what Triton's interpreter gets wrong
    lazy               names of a package that are loaded at their first use
"""
