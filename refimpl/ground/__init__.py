"""What techniques and meters both stand on, so that neither needs the other to be read or loaded.

    ledger             the categories of bytes, and tables of them
    marks              a technique says what a tensor is for; a meter subscribes
    spans              what a rank does, and what goes on meanwhile
    tensors            which tensors are in a thing, and whether one is of a dry run
    rerun, options, derivatives    a function that is run again; options that are strings; transforms that are refused
    activation_bytes, state_bytes, step_bytes    the closed forms of a model, its states and a step
"""
