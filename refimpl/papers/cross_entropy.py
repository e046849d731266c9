"""The loss of a language model's head without its logits, in one screen.

N hidden states h of C features and a weight W of V rows, one for each word, make logits z = h Wᵀ, N · V numbers. They
are the largest tensor of many training steps, and are there three times: themselves, their log-softmax, their gradient.

    loss_i = log Σ_j exp(z_ij) − z_it                t: the target of row i
    g_ij = softmax(z_i)_j − [j = t]                  its gradient by the logits, from the same row alone
    dh = g W / n      dW = gᵀ h / n                  the gradients of the mean of n rows

A row needs no other row's logits. So some rows at a time go all the way: logits, loss, gradient of the logits,
gradients of h and W. What is left for backward is the gradient of the loss, one number, which multiplies dh and dW.

    bytes     R·V·4 + N·C·d + V·C·4                  R rows of logits, not 3 · N·V·4; dh, of d bytes; dW in fp32
    time      three matrix products, as with the logits

dW adds up over chunks, so it is summed in fp32, whatever the weight's dtype. n is that of all rows: a chunk divided by
its own count gives another gradient wherever targets are ignored.

"Liger Kernel" (Hsu et al. 2024), section 3.2. The logits of a chunk are as large as all hidden states if R = N·C/V.

Names of tensors end with their shape: N rows, C features, V words, R rows of a chunk.
"""

import torch

IGNORED = -100


class LinearCrossEntropy(torch.autograd.Function):
    """Map (hidden_NC, weight_VC, targets_N, R) to the mean loss of the rows whose target is not IGNORED."""

    @staticmethod
    def forward(ctx, hidden_NC, weight_VC, targets_N, R):
        n = (targets_N != IGNORED).sum().clamp(min=1)  # if no row counts: loss 0 and gradients 0
        dh_NC = torch.empty_like(hidden_NC)
        dW_VC = torch.zeros_like(weight_VC, dtype=torch.float32)
        loss = dW_VC.new_zeros(())
        for first in range(0, len(hidden_NC), R):
            h_RC, t_R = hidden_NC[first : first + R], targets_N[first : first + R]
            z_RV = (h_RC @ weight_VC.T).float()
            counts_R = (t_R != IGNORED).float()
            column_R1 = t_R.clamp(min=0)[:, None]
            z_RV -= z_RV.amax(1, keepdim=True)  # exp does not overflow
            predicted_R = z_RV.gather(1, column_R1)[:, 0]
            sum_R = z_RV.exp_().sum(1)
            loss += ((sum_R.log() - predicted_R) * counts_R).sum()

            z_RV *= (counts_R / sum_R)[:, None]  # softmax, and then g, in the memory of the logits
            z_RV.scatter_add_(1, column_R1, -counts_R[:, None])
            torch.mm(z_RV.to(weight_VC.dtype), weight_VC, out=dh_NC[first : first + R])
            dW_VC.addmm_(z_RV.T, h_RC.float())
            del z_RV
        ctx.gradients, ctx.n = (dh_NC, dW_VC), n
        return loss / n

    @staticmethod
    def backward(ctx, gradient):
        dh_NC, dW_VC = ctx.gradients
        del ctx.gradients
        scale = gradient / ctx.n
        return dh_NC.mul_(scale), dW_VC.mul_(scale).to(dh_NC.dtype), None, None


def linear_cross_entropy(hidden_NC, weight_VC, targets_N, R):
    """Return the mean loss of a head, R rows at a time. `weight_VC`: in hidden's dtype."""
    return LinearCrossEntropy.apply(hidden_NC, weight_VC, targets_N, R)
