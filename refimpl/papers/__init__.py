"""The reference in one afternoon: each technique in one screen, without checks, held to the bits and bytes of the
hardened version. A file needs nothing but torch, and is read alone. In the order of reading:

    meter                   ZeRO, section 3                    which bytes are what: states, activations, the rest
    mixed_precision         Micikevicius et al. 2018           2 for 4 bytes an activation; 16Ψ of states either way
    accumulation            Goyal et al. 2017, section 3       activations of one micro-batch for those of the batch
    recomputation           Chen et al. 2016, section 3        √n inputs for n layers' activations
    activations             Chen et al. 2021 (ActNN)           n + 8⌈n/g⌉ for 4n
    sequence_length         Chen et al. 2016, section 5        activations of one chunk, and 4e·L·B·s·G·D of keys
    cross_entropy           Hsu et al. 2024, section 3.2        R·V for 3·N·V numbers of logits
    flash_attention         Dao et al. 2022, 2023              O and L, T·D, for weights, T²
    flash_attention_triton  Dao 2023, algorithm 1              the same, and no tile leaves the chip
    block_sparse            Beltagy et al. 2020                the FLOPs of listed blocks, T·w, for T²
    linear_attention        Yang et al. 2024                   a state, D·V numbers, for keys and values, T·(D + V)
    native_sparse           Yuan et al. 2025                   T/N + k·N + W scores of a query for T
    collectives             Patarasuk & Yuan 2009              2(N−1)/N · B on the wire
    zero                    Rajbhandari et al. 2020            16Ψ/N for 16Ψ
    quantized_zero          Wang et al. 2023 (ZeRO++)          1 + 4/b for 4 bytes a number on the wire
    compression             Lin et al. 2018                    8ρn for 2(N−1)/N · 4n on the wire
    offload                 Ren et al. 2021                    2 + 2 bytes a parameter on the device, 12 in a file
    tensor_parallel         Shoeybi et al. 2019                1/N of a layer's weights and inner activations
    ring_attention          Liu et al. 2023                    1/N of the tokens, two blocks of keys
    pipeline                Narayanan et al. 2019, 2021        min(m, p − r) micro-batches in flight for m
    pipeline_simulator      Qi et al. 2023                     the same by arithmetic: time, idle, what is held
    caching_allocator       PyTorch's CUDACachingAllocator     reserved = allocated + free blocks
    static_plan             Pisarchyk & Lee 2020               the most that is live at once, nearly

`tests/` beside each package prove that a paper does what the hardened version does.
"""
