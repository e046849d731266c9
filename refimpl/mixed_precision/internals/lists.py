"""Which operation runs in which precision, and why: the two tables that `autocast` reads, one a device.

A name is an operation of `torch.ops.aten`, `name` or `name.overload`. What is in no table runs as it is called, in the
types that its arguments have: GELU, dropout, views, `a + b` (where PyTorch's own promotion gives the wider type). The
tables are those of `torch.autocast`, op by op (PyTorch 2.11 to 2.14, `ATen/autocast_mode.h` and `autocast_mode.cpp`;
what a version does not have is passed over), so that the same program has the same types under both; the reasons are
ours. In-place operations and those with `out=` are in no table: code that writes into a tensor has chosen its type.

The tables differ. CUDA's was made for fp16, whose range ends at 65504: whatever may leave it, exp, powers, sums,
softmax, norms, runs in fp32. The CPU's was made for bf16, which has fp32's range: softmax, LayerNorm and sum stay as
they are called (their kernels add up in fp32 and round once, at the end), and its table names what has no kernel, or no
accurate one, in 16 bits. With fp16 on a CPU it is therefore you who keep large sums in fp32.
"""

LOW = "low"  # every argument in the region's dtype
FP32 = "fp32"  # every argument in fp32
FP32_RESULT = "fp32 result"  # the argument stays as it is, `dtype=torch.float32` is passed: no fp32 copy of the input
PROMOTE = "promote"  # every argument in the widest type among them
REFUSE = "refuse"  # an error that says what to use instead

# (policy, reason, operations)
CUDA = (
    (LOW, "a matrix product does many multiply-adds for each number it loads and adds up in fp32 inside: tensor cores "
          "take 16-bit operands, and the rounding of the operands averages out over the sum",
     "matmul mm mv bmm addmm addmv addr addbmm baddbmm linear einsum chain_matmul linalg_multi_dot linalg_vecdot"),
    (LOW, "a convolution is a matrix product over patches",
     "_convolution _convolution.deprecated convolution conv1d conv2d conv3d conv_tbc conv_transpose1d "
     "conv_transpose2d.input conv_transpose3d.input cudnn_convolution cudnn_convolution_transpose"),
    (LOW, "attention is two matrix products; its kernel keeps the softmax between them in fp32 registers",
     "scaled_dot_product_attention _scaled_dot_product_flash_attention"),
    (LOW, "a recurrent cell is two matrix products and cheap gates, which have to have one type",
     "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _thnn_fused_lstm_cell _thnn_fused_gru_cell"),
    (LOW, "one multiplication; its weight has to have the type of its input", "prelu"),
    (FP32, "exp overflows fp16 past x = 11.1, and its relative error is the absolute error of x",
     "exp expm1 cosh sinh"),
    (FP32, "log of a rounded probability is off by the relative rounding error, as much as a small loss",
     "log log2 log10 log1p"),
    (FP32, "powers leave the range of fp16 at once: 256² does, and 1/x for small x",
     "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar reciprocal rsqrt"),
    (FP32, "steep somewhere: there, one rounding of the input changes the output by many roundings",
     "acos asin tan erfinv softplus"),
    (FP32, "a norm takes mean and variance over a whole row: sums of squares, which neither range nor rounding of 16 "
           "bits stands",
     "layer_norm native_layer_norm rms_norm group_norm renorm cosine_similarity"),
    (FP32, "a norm of a vector or a matrix is a sum of squares", "frobenius_norm.dim nuclear_norm nuclear_norm.dim"),
    (FP32, "a distance is a difference of near numbers, squared and summed", "dist pdist cdist"),
    (FP32, "a loss is a sum over the batch of logs or squares, and everything downstream hangs on it",
     "nll_loss nll_loss2d kl_div l1_loss smooth_l1_loss huber_loss mse_loss binary_cross_entropy_with_logits "
     "poisson_nll_loss cosine_embedding_loss hinge_embedding_loss margin_ranking_loss multilabel_margin_loss "
     "soft_margin_loss triplet_margin_loss multi_margin_loss"),
    (FP32, "exp, a sum and a log: each of them would be reason enough", "logsumexp"),
    (FP32, "interpolation adds up in the type of its input",
     "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
     "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d "
     "upsample_bicubic2d _upsample_bicubic2d_aa"),
    (FP32_RESULT, "the kernel reads 16 bits, works in fp32 and can write fp32: rounding probabilities or sums would "
                  "lose what it had; a sum of many numbers soon passes fp16's 65504",
     "softmax.int log_softmax.int sum sum.dim_IntList prod prod.dim_int cumsum cumprod linalg_vector_norm "
     "linalg_matrix_norm linalg_matrix_norm.str_ord norm.Scalar norm.ScalarOpt_dim"),
    (FP32, "LAPACK and cuSOLVER have no 16-bit routines: eigenvalues", "linalg_matrix_sqrth"),
    (PROMOTE, "takes several tensors and wants one type of them: the widest loses nothing",
     "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"),
    (REFUSE, "its backward divides by p and 1−p, which in 16 bits are 0 too often; the version with logits takes the "
             "sigmoid inside, where the two cancel", "binary_cross_entropy"),
)

CPU = (
    (LOW, "a matrix product, as on a GPU: half of the bytes to load, sums in fp32 inside (AMX, AVX-512 and NEON "
          "multiply bf16 in hardware)",
     "matmul mm bmm addmm addbmm baddbmm linear _addmm_activation linalg_vecdot"),
    (LOW, "a convolution is a matrix product over patches",
     "_convolution.deprecated conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding conv_tbc "
     "conv_transpose1d conv_transpose2d.input conv_transpose3d.input"),
    (LOW, "attention is two matrix products, softmax in fp32 inside",
     "scaled_dot_product_attention _native_multi_head_attention"),
    (LOW, "oneDNN's LSTM is matrix products and gates, in one type", "mkldnn_rnn_layer"),
    (LOW, "one multiplication; its weight has to have the type of its input", "prelu"),
    (FP32, "a loss is a sum over the batch of logs or squares, and everything downstream hangs on it",
     "cross_entropy_loss nll_loss nll_loss2d binary_cross_entropy binary_cross_entropy_with_logits kl_div l1_loss "
     "smooth_l1_loss huber_loss mse_loss poisson_nll_loss cosine_embedding_loss hinge_embedding_loss "
     "margin_ranking_loss multilabel_margin_loss multilabel_margin_loss_forward soft_margin_loss triplet_margin_loss "
     "multi_margin_loss ctc_loss.IntList ctc_loss.Tensor"),
    (FP32, "products of many factors and distances leave the range or cancel", "prod prod.dim_int trace cdist"),
    (FP32, "no kernel in 16 bits, or one that adds up in 16 bits: pooling in three dimensions, padding, sampling",
     "avg_pool3d max_pool3d adaptive_avg_pool3d adaptive_max_pool3d max_unpool2d max_unpool3d fractional_max_pool2d "
     "fractional_max_pool3d reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d "
     "grid_sampler grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback"),
    (FP32, "order statistics interpolate between neighbours, which 16 bits may not tell apart",
     "quantile quantile.scalar nanquantile nanquantile.scalar"),
    (FP32, "complex numbers and Fourier transforms have no bf16",
     "polar view_as_complex stft stft.center fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn fft_ifftn fft_rfft fft_irfft "
     "fft_rfft2 fft_irfft2 fft_rfftn fft_irfftn fft_hfft fft_ihfft"),
    (FP32, "LAPACK has no 16-bit routines: decompositions and solvers",
     "cholesky cholesky_inverse cholesky_solve inverse pinverse geqrf orgqr ormqr qr svd triangular_solve lu_solve "
     "_lu_with_info linalg_cholesky linalg_cholesky_ex linalg_cond linalg_cond.p_str linalg_eig linalg_eigh "
     "linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq "
     "linalg_matrix_sqrth linalg_matrix_rank linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.atol_rtol_float "
     "linalg_matrix_rank.tol_tensor linalg_qr linalg_solve linalg_svd linalg_svdvals linalg_tensorinv "
     "linalg_tensorsolve"),
    (FP32, "scales were calibrated on fp32 values", "fake_quantize_per_tensor_affine"),
    (PROMOTE, "joins tensors into one: the widest type loses nothing", "cat stack index_copy"),
)


def policies(table):
    """Return {operation: policy} of a table. Raises AssertionError if an operation is in it twice."""
    found = {}
    for policy, _, names in table:
        for name in names.split():
            assert name not in found, f"{name} stands in the table twice"
            found[name] = policy
    return found


POLICIES = {"cuda": policies(CUDA), "cpu": policies(CPU)}
