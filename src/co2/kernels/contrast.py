# mypy: allow-untyped-defs, allow-incomplete-defs
"""The objective as Triton kernels that stream the negatives and never hold a [B, K] matrix.

Notation, for one query q with positive p, negatives n_j, and temperatures τ (instance) and σ (consistency):

    s = q·p,  a_j = q·n_j,  b_j = p·n_j,  d_j = (b_j − a_j)/σ
    Z = log(e^{s/τ} + Σ_j e^{a_j/τ}),  w_j = e^{a_j/τ − Z},  w₊ = e^{s/τ − Z},  Q = softmax(a/σ),  P = softmax(b/σ)

Forward. L_ins = Z − s/τ. log P_j − log Q_j is d_j plus a constant of the row and ΣP = ΣQ, so the normalisers cancel in

    L_con = ½KL(P‖Q) + ½KL(Q‖P) = ½ Σ_j (P_j − Q_j) d_j = ½(E_P[d] − E_Q[d])

and a row needs five sums over the negatives: Σe^{a/τ}, Σe^{a/σ}, Σe^{b/σ}, Σe^{a/σ}d and Σe^{b/σ}d. Unit rows have
a ≤ 1, so e^{(a−1)/σ} is safe down to σ = 0.03; below that the sums follow a running maximum, as in online softmax.
Label smoothing ε spreads ε of the target over the n visible negatives and the positive:

    L_ins = Z − (1 − ε)s/τ − ε(s + Σ_j a_j)/((n + 1)τ)

Backward. With row gradients g of L_ins and h of L_con, ∂E_Q[f]/∂a_j = Q_j(f_j − E_Q[f])/σ for fixed f, and ∂d_j/∂a_j =
−1/σ = −∂d_j/∂b_j, so that the gradients with respect to a_j and b_j are

    G_j = (g/τ)(w_j − ε/(n + 1)) + (h/2σ)[Q_j(1 − d_j + E_Q[d]) − P_j]
    H_j =                          (h/2σ)[P_j(1 + d_j − E_P[d]) − Q_j]        (0 where the target is detached)

and with the gradient S = (g/τ)(w₊ − (1 − ε) − ε/(n + 1)) with respect to s

    ∂/∂q = Σ_j G_j n_j + S p,    ∂/∂p = Σ_j H_j n_j + S q,    ∂/∂n_j = Σ_rows (G_j q + H_j p)

Other forms. The target may have a temperature ρ of its own: then P = softmax(b/ρ) and d_j = b_j/ρ − a_j/σ, which is
log P_j − log Q_j + Z_P − Z_Q with the logarithms Z of the sums, and H_j has 1/ρ in the place of 1/σ. One-sided:

    KL(P‖Q) = E_P[d] − Z_P + Z_Q,   G_j = (h/σ)(Q_j − P_j),             H_j = (h/ρ) P_j(d_j − E_P[d])
    KL(Q‖P) = Z_P − Z_Q − E_Q[d],   G_j = (h/σ) Q_j(E_Q[d] − d_j),      H_j = (h/ρ)(P_j − Q_j)

The cross entropy of a soft label's relation with the instance term's own prediction is Z − E_P[a]/τ = L_ins + s/τ + R.
The kernels give s/τ + R, where R = −E_P[a]/τ is E_P[d] with σ = τ and d_j = −a_j/τ, so that G_j = −(h/τ) P_j, H_j is
as of KL(P‖Q) and S has h/τ more. How much of it counts beside L_ins is the label's share and not the kernels' business.

a and b are computed again, which is cheaper than storing them. MoCo needs ∂/∂q alone and gets no more than that.

Order. Rows × splits of the negatives fill the chip. Each program writes its partial sums, and a small second kernel
adds them in a fixed order: no atomics, no host synchronisation, and bitwise the same result for the same inputs on one
device. Queries and positives are stacked into one operand, so that a and b come from one product, thread by thread.

Precision. Sums and everything between the matrix products are float32. The operands of the products are rounded to
float16 (precision="fast", the default) or kept in float32 (precision="full", without the matrix units). float16 has
TF32's ten bits of mantissa at twice the rate and half the traffic. What it lacks is range, which unit rows do not need:
no element exceeds 1, and one below 2^-14 loses at most 2^-25 of a row of length 1. bfloat16 rows lose nothing else.
The weights G and H are scaled by a bound of their size before they are rounded, and the product is scaled back.
Relative errors against float64 at B = 256, K = 65,536, D = 128, τ = 0.2, σ = 0.05 on an H200 (results/speed.csv):

                                     L_ins    L_con    gradient of L_ins   gradient of L_con
    fused, "fast"                    9e-7     9e-5     8e-6                5e-4
    reference with TF32 products     9e-7     9e-5     8e-6                5e-4
    fused, "full"                    8e-8     8e-8     5e-8                8e-7
    reference in float32             6e-8     6e-8     5e-8                3e-7

Contract. Rows have length 1 (CO2_DEBUG=1 checks that). Rows of another length are computed too, until e^{(a−1)/σ} or an
operand leaves its range; from there the result is inf or NaN. NaN in a query or positive makes its row NaN, NaN in a
negative makes every row NaN.

Where the time goes. Per pair (row, negative), forward and backward do 2 and 3 products of length D and 3 exponentials
each, or 2 where τ/σ is 1, 2, 4 or 8, because e^{a/σ} is then e^{a/τ} squared. Per cycle, one multiprocessor of an H200
does 2,048 float16 multiply-adds and 16 exponentials and issues 4 instructions for 32 lanes. A tile of 64 rows × 64
negatives at D = 128 so takes, in cycles, forward and backward: matrix units 512 and 768, exponentials 512 and 512 (at
τ = 4σ), and by the compiled code, issue slots 644 and 589 (565 and 484 where the negatives are float16 already). Issue
is as much the limit as the matrix units are, which is why row sums stay in their thread to the end (`_lane_sums`).
Measured forward and backward together: 0.093 ms at B = 256 and 0.73 ms at B = 4,096 (K = 65,536), of which the products
alone need 0.03 and 0.50 ms at the 674 TFLOP/s that a float16 matrix product reaches on the same card. At B = 256 the
two streaming kernels take nearly all of it, forward 0.046 and backward 0.050 ms, so the way on leads through them.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

LN_2 = tl.constexpr(math.log(2))

# The forms of the consistency term, see the head of this file.
SYMMETRIC = tl.constexpr(0)
KL = tl.constexpr(1)
REVERSE = tl.constexpr(2)
RELATION = tl.constexpr(3)

# What forward leaves for backward, one row of `statistics` [7, B] each.
Z = tl.constexpr(0)  # log₂(e^{s/τ} + Σe^{a/τ})
ZQ = tl.constexpr(1)  # log₂ Σe^{a/σ}
ZP = tl.constexpr(2)  # log₂ Σe^{b/ρ}
MEAN_Q = tl.constexpr(3)  # E_Q[d]
MEAN_P = tl.constexpr(4)  # E_P[d]
WEIGHT_POSITIVE = tl.constexpr(5)  # w₊
SHARE = tl.constexpr(6)  # 1/(n + 1), n the visible negatives
STATISTICS = 7

# What a program of the forward kernel leaves for the merge, one [splits, B] plane of `partial` each.
TOP_A = tl.constexpr(0)  # what the a of the sums below are relative to
TOP_B = tl.constexpr(1)
SUM_W = tl.constexpr(2)  # Σe^{(a − top)/τ}
ABOVE = tl.constexpr(3)  # how many a exceed s
SUM_A = tl.constexpr(4)
VISIBLE = tl.constexpr(5)
SUM_Q = tl.constexpr(6)  # Σe^{(a − top)/σ}
SUM_QD = tl.constexpr(7)  # Σe^{(a − top)/σ}σd
SUM_P = tl.constexpr(8)
SUM_PD = tl.constexpr(9)
PARTIALS = 10

# A similarity that no unit rows have and whose exponential is 0 at any temperature, for columns a row must not see.
# Below the lowest maximum, so that a row that sees nothing sums to 0; finite, so that differences are not NaN.
HIDDEN = tl.constexpr(-1e30)
LOWEST = tl.constexpr(-1e20)

# Weights are scaled to stay below this before they are rounded to float16, which reaches from 2^-24 to 2^16.
WEIGHT_LIMIT = tl.constexpr(2.0**14)


@triton.jit
def _load_negatives(
    pointer, stride, rows, row_count, first_dim, D,
    COMPUTE: tl.constexpr, EVEN_K: tl.constexpr, EVEN_D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """[rows, BLOCK_D] of the negatives from `pointer` on, rounded; what lies outside them is 0."""
    dims = first_dim + tl.arange(0, BLOCK_D)
    address = pointer + rows[:, None] * stride + dims[None, :]
    if EVEN_K and EVEN_D:
        tile = tl.load(address)
    elif EVEN_D:
        tile = tl.load(address, mask=(rows < row_count)[:, None], other=0.0)
    else:
        tile = tl.load(address, mask=(rows < row_count)[:, None] & (dims < D)[None, :], other=0.0)
    return tile.to(COMPUTE)


@triton.jit
def _load_operands(
    operands, first_row, B, first_dim, D,
    PARTS: tl.constexpr, EVEN_D: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_B queries and below them, where PARTS is 2, their positives: one tile, so that one product serves both."""
    index = tl.arange(0, PARTS * BLOCK_B)
    rows = first_row + index % BLOCK_B
    dims = first_dim + tl.arange(0, BLOCK_D)
    address = operands + ((index // BLOCK_B).to(tl.int64) * B + rows)[:, None] * D + dims[None, :]  # of [2, B, D]
    if EVEN_D:
        mask = (rows < B)[:, None]
    else:
        mask = (rows < B)[:, None] & (dims < D)[None, :]
    return tl.load(address, mask=mask, other=0.0)


@triton.jit
def _similarities(
    operands, first_row, tile_pointer, negatives_stride, inside, rest, B, D,
    PARTS: tl.constexpr, EVEN_K: tl.constexpr, EVEN_D: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """a above b, [PARTS * BLOCK_B, BLOCK_K], for embeddings too long to stay on the chip."""
    COMPUTE: tl.constexpr = operands.dtype.element_ty
    both = tl.zeros([PARTS * BLOCK_B, BLOCK_K], tl.float32)
    for dim in range(0, D, BLOCK_D):
        n = _load_negatives(tile_pointer, negatives_stride, inside, rest, dim, D, COMPUTE, EVEN_K, EVEN_D, BLOCK_D)
        qp = _load_operands(operands, first_row, B, dim, D, PARTS, EVEN_D, BLOCK_B, BLOCK_D)
        both = tl.dot(qp, tl.trans(n), both, input_precision="ieee")
    return both


@triton.jit
def _unstack(both, PARTS: tl.constexpr):
    """The upper and the lower half of a tile. After a matrix product each thread holds both: nothing moves."""
    if PARTS == 1:
        upper, lower = both, both
    else:
        halves = tl.reshape(both, [2, both.shape[0] // 2, both.shape[1]])
        upper, lower = tl.split(tl.permute(halves, (1, 2, 0)))
    return upper, lower


@triton.jit
def _stack(upper, lower):
    both = tl.permute(tl.join(upper, lower), (2, 0, 1))
    return tl.reshape(both, [2 * upper.shape[0], upper.shape[1]])


@triton.jit
def _hidden(rows, columns, exclude, exclude_stride, exclude_step, B, K, E, EXCLUDE: tl.constexpr):
    """Which pairs do not count: columns past the end and those a row excludes. `rows` and `columns` broadcast."""
    hidden = (columns >= K) | (rows < 0)
    if EXCLUDE:
        for entry in range(E):
            column = tl.load(exclude + rows * exclude_stride + entry * exclude_step, mask=rows < B, other=-1)
            hidden = hidden | (column == columns)
    return hidden


@triton.jit
def _power(x, SQUARINGS: tl.constexpr):
    for _ in tl.static_range(SQUARINGS):
        x = x * x
    return x


@triton.jit
def _lane_sums(x):
    """[rows, columns] to [rows, 4]: each thread adds the columns that a matrix product leaves it, and no others yet.

    Thread i of the four that share a row holds columns 8m + 2i and 8m + 2i + 1.
    """
    x = tl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2])
    return tl.sum(tl.sum(x, axis=1), axis=2)


@triton.jit
def prepare_kernel(
    query, positive, rounded, similarity,
    B, D, query_stride, query_step, positive_stride, positive_step, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One row of queries and positives as operands of the products, and s = q·p from the exact ones."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.zeros([BLOCK_D], tl.float32)
    for dim in range(0, D, BLOCK_D):
        dims = dim + tl.arange(0, BLOCK_D)
        inside = dims < D
        q = tl.load(query + row * query_stride + dims * query_step, mask=inside, other=0.0).to(tl.float32)
        p = tl.load(positive + row * positive_stride + dims * positive_step, mask=inside, other=0.0).to(tl.float32)
        s += q * p
        tl.store(rounded + row * D + dims, q.to(rounded.dtype.element_ty), mask=inside)
        tl.store(rounded + (B + row) * D + dims, p.to(rounded.dtype.element_ty), mask=inside)
    tl.store(similarity + row, tl.sum(s, axis=0))


@triton.jit
def forward_kernel(
    operands, negatives, exclude, similarity, partial,
    B, K, D, E, negatives_stride, exclude_stride, exclude_step, tiles_per_split, per_tau, per_sigma, per_rho,
    CONSISTENCY: tl.constexpr, FORM: tl.constexpr, SMOOTHING: tl.constexpr, EXCLUDE: tl.constexpr,
    SQUARINGS: tl.constexpr, RUNNING: tl.constexpr, EVEN_K: tl.constexpr, EVEN_D: tl.constexpr, ONE_D: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The sums of BLOCK_B rows over one split of the negatives."""
    PARTS: tl.constexpr = 2 if CONSISTENCY else 1
    COMPUTE: tl.constexpr = operands.dtype.element_ty
    first_row = tl.program_id(0) * BLOCK_B
    rows = (first_row + tl.arange(0, BLOCK_B)).to(tl.int64)
    in_batch = rows < B
    split = tl.program_id(1)
    first_tile = split * tiles_per_split
    last_tile = tl.minimum(first_tile + tiles_per_split, tl.cdiv(K, BLOCK_K))
    inside = tl.arange(0, BLOCK_K)
    tile_pointer = negatives + first_tile.to(tl.int64) * BLOCK_K * negatives_stride
    s = tl.load(similarity + rows, mask=in_batch, other=0.0)[:, None]
    ratio = per_rho / per_sigma
    if ONE_D:  # queries and positives stay on the chip
        qp = _load_operands(operands, first_row, B, 0, D, PARTS, EVEN_D, BLOCK_B, BLOCK_D)

    top_a = tl.full([BLOCK_B], LOWEST if RUNNING else 1.0, tl.float32)
    top_b = top_a
    above = tl.zeros([BLOCK_B, 4], tl.float32)  # exact up to 2^24
    visible = tl.zeros([BLOCK_B, 4], tl.float32)
    sum_a = tl.zeros([BLOCK_B, 4], tl.float32)
    sum_w = tl.zeros([BLOCK_B, 4], tl.float32)
    sum_q = tl.zeros([BLOCK_B, 4], tl.float32)
    sum_qd = tl.zeros([BLOCK_B, 4], tl.float32)
    sum_p = tl.zeros([BLOCK_B, 4], tl.float32)
    sum_pd = tl.zeros([BLOCK_B, 4], tl.float32)

    for tile in range(first_tile, last_tile):
        rest = K - tile * BLOCK_K
        if ONE_D:
            n = _load_negatives(tile_pointer, negatives_stride, inside, rest, 0, D, COMPUTE, EVEN_K, EVEN_D, BLOCK_D)
            both = tl.dot(qp, tl.trans(n), input_precision="ieee")
        else:
            both = _similarities(
                operands, first_row, tile_pointer, negatives_stride, inside, rest, B, D,
                PARTS, EVEN_K, EVEN_D, BLOCK_B, BLOCK_K, BLOCK_D,
            )  # fmt: skip
        a, b = _unstack(both, PARTS)  # [BLOCK_B, BLOCK_K] each
        tile_pointer += BLOCK_K * negatives_stride

        if EXCLUDE or not EVEN_K:
            columns = tile * BLOCK_K + inside
            hidden = _hidden(rows[:, None], columns[None, :], exclude, exclude_stride, exclude_step, B, K, E, EXCLUDE)
            if SMOOTHING:
                sum_a += _lane_sums(tl.where(hidden, 0.0, a))
                visible += _lane_sums(tl.where(hidden, 0.0, 1.0))
            a = tl.where(hidden, HIDDEN, a)
            b = tl.where(hidden, HIDDEN, b)
        elif SMOOTHING:
            sum_a += _lane_sums(a)
            visible += BLOCK_K // 4

        if RUNNING:  # what the sums are relative to rises, so they shrink
            old_top, top_a = top_a, tl.maximum(top_a, tl.max(a, axis=1))
            sum_w *= tl.exp2((old_top - top_a) * per_tau)[:, None]
            if CONSISTENCY:
                fade = tl.exp2((old_top - top_a) * per_sigma)[:, None]
                sum_q *= fade
                sum_qd *= fade
                old_top, top_b = top_b, tl.maximum(top_b, tl.max(b, axis=1))
                fade = tl.exp2((old_top - top_b) * per_rho)[:, None]
                sum_p *= fade
                sum_pd *= fade
        above += _lane_sums(tl.where(a > s, 1.0, 0.0))
        w = tl.exp2(a * per_tau - (top_a * per_tau)[:, None])
        sum_w += _lane_sums(w)
        if CONSISTENCY:
            p_weight = tl.exp2(b * per_rho - (top_b * per_rho)[:, None])
            if FORM == RELATION:
                difference = -a
            else:
                difference = b * ratio - a
                if SQUARINGS >= 0:
                    q_weight = _power(w, SQUARINGS)
                else:
                    q_weight = tl.exp2(a * per_sigma - (top_a * per_sigma)[:, None])
                sum_q += _lane_sums(q_weight)
                if FORM != KL:
                    sum_qd += _lane_sums(q_weight * difference)
            sum_p += _lane_sums(p_weight)
            sum_pd += _lane_sums(p_weight * difference)

    plane = tl.num_programs(1).to(tl.int64) * B
    out = partial + split.to(tl.int64) * B + rows
    tl.store(out + TOP_A * plane, top_a, mask=in_batch)
    tl.store(out + SUM_W * plane, tl.sum(sum_w, axis=1), mask=in_batch)
    tl.store(out + ABOVE * plane, tl.sum(above, axis=1), mask=in_batch)
    if SMOOTHING:
        tl.store(out + SUM_A * plane, tl.sum(sum_a, axis=1), mask=in_batch)
        tl.store(out + VISIBLE * plane, tl.sum(visible, axis=1), mask=in_batch)
    if CONSISTENCY:
        tl.store(out + TOP_B * plane, top_b, mask=in_batch)
        tl.store(out + SUM_Q * plane, tl.sum(sum_q, axis=1), mask=in_batch)
        tl.store(out + SUM_QD * plane, tl.sum(sum_qd, axis=1), mask=in_batch)
        tl.store(out + SUM_P * plane, tl.sum(sum_p, axis=1), mask=in_batch)
        tl.store(out + SUM_PD * plane, tl.sum(sum_pd, axis=1), mask=in_batch)


@triton.jit
def merge_forward_kernel(
    similarity, partial, instance, consistency, rank, statistics,
    B, splits, per_tau, per_sigma, per_rho, smoothing,
    CONSISTENCY: tl.constexpr, FORM: tl.constexpr, SMOOTHING: tl.constexpr,
    BLOCK_SPLIT: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """The losses of BLOCK_B rows and what backward needs, from the sums of all splits."""
    rows = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    inside = rows < B
    each = tl.arange(0, BLOCK_SPLIT)
    mask = (each < splits)[:, None] & inside[None, :]
    plane = splits * B
    source = partial + each.to(tl.int64)[:, None] * B + rows[None, :]  # [BLOCK_SPLIT, BLOCK_B]
    s = tl.load(similarity + rows, mask=inside, other=0.0)

    tops = tl.load(source + TOP_A * plane, mask=mask, other=LOWEST)
    top_a = tl.max(tops, axis=0)
    fade = tops - top_a[None, :]
    sum_w = tl.sum(tl.load(source + SUM_W * plane, mask=mask, other=0.0) * tl.exp2(fade * per_tau), axis=0)
    above = tl.sum(tl.load(source + ABOVE * plane, mask=mask, other=0.0).to(tl.int64), axis=0)
    # The positive joins the negatives: log₂(e^{s/τ} + Σe^{a/τ}), relative to the larger of both.
    top = tl.maximum(s, top_a) * per_tau
    z = tl.log2(tl.exp2(s * per_tau - top) + sum_w * tl.exp2(top_a * per_tau - top)) + top
    loss = (z - s * per_tau) * LN_2
    if SMOOTHING:
        sum_a = tl.sum(tl.load(source + SUM_A * plane, mask=mask, other=0.0), axis=0)
        visible = tl.sum(tl.load(source + VISIBLE * plane, mask=mask, other=0.0), axis=0)
        share = 1.0 / (visible + 1.0)
        loss += smoothing * (s - (s + sum_a) * share) * (per_tau * LN_2)
        tl.store(statistics + SHARE * B + rows, share, mask=inside)
    tl.store(instance + rows, loss, mask=inside)
    tl.store(rank + rows, above, mask=inside)
    tl.store(statistics + Z * B + rows, z, mask=inside)
    tl.store(statistics + WEIGHT_POSITIVE * B + rows, tl.exp2(s * per_tau - z), mask=inside)

    if CONSISTENCY:
        fade = tl.exp2(fade * per_sigma)
        sum_q = tl.sum(tl.load(source + SUM_Q * plane, mask=mask, other=0.0) * fade, axis=0)
        sum_qd = tl.sum(tl.load(source + SUM_QD * plane, mask=mask, other=0.0) * fade, axis=0)
        tops = tl.load(source + TOP_B * plane, mask=mask, other=LOWEST)
        top_b = tl.max(tops, axis=0)
        fade = tl.exp2((tops - top_b[None, :]) * per_rho)
        sum_p = tl.sum(tl.load(source + SUM_P * plane, mask=mask, other=0.0) * fade, axis=0)
        sum_pd = tl.sum(tl.load(source + SUM_PD * plane, mask=mask, other=0.0) * fade, axis=0)
        # A row that sees no negative has sums of 0: it loses nothing, and its weights must stay 0 in backward.
        blind = sum_p == 0.0
        sum_q = tl.where(sum_q == 0.0, 1.0, sum_q)
        sum_p = tl.where(blind, 1.0, sum_p)
        mean_q = sum_qd / sum_q * (per_sigma * LN_2)
        mean_p = sum_pd / sum_p * (per_sigma * LN_2)
        zq = tl.where(blind, z * (per_sigma / per_tau), top_a * per_sigma + tl.log2(sum_q))
        zp = tl.where(blind, 0.0, top_b * per_rho + tl.log2(sum_p))
        if FORM == SYMMETRIC:
            apart = 0.5 * (mean_p - mean_q)
        elif FORM == KL:
            apart = tl.where(blind, 0.0, mean_p - (zp - zq) * LN_2)
        elif FORM == REVERSE:
            apart = tl.where(blind, 0.0, (zp - zq) * LN_2 - mean_q)
        else:
            apart = tl.where(blind, 0.0, s * (per_tau * LN_2) + mean_p)
            zq = z  # σ is τ, and the weights of a are those of the instance term
            mean_q = tl.where(blind, 0.0, 1.0)  # what s counts for
        tl.store(consistency + rows, apart, mask=inside)
        tl.store(statistics + ZQ * B + rows, zq, mask=inside)
        tl.store(statistics + ZP * B + rows, zp, mask=inside)
        tl.store(statistics + MEAN_Q * B + rows, mean_q, mask=inside)
        tl.store(statistics + MEAN_P * B + rows, mean_p, mask=inside)


@triton.jit
def _row_gradients(
    grad_instance, grad_consistency, grad_instance_stride, grad_consistency_stride, rows, B,
    per_tau, per_sigma, per_rho, INSTANCE: tl.constexpr, CONSISTENCY: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """g/τ, h/2σ (h/σ of the one-sided forms), and a bound of |G_j| and |H_j|: w, Q and P are at most 1, |d| and |E[d]|
    at most 1/σ + 1/ρ for unit rows."""
    inside = rows < B
    on_instance = tl.zeros_like(rows).to(tl.float32)
    on_consistency = on_instance
    bound = on_instance
    if INSTANCE:
        g = tl.load(grad_instance + rows * grad_instance_stride, mask=inside, other=0.0).to(tl.float32)
        on_instance = g * (per_tau * LN_2)
        bound += tl.abs(on_instance)
    if CONSISTENCY:
        h = tl.load(grad_consistency + rows * grad_consistency_stride, mask=inside, other=0.0).to(tl.float32)
        on_consistency = h * ((0.5 if FORM == SYMMETRIC else 1.0) * per_sigma * LN_2)
        bound += tl.abs(on_consistency) * (
            (2.0 + 2.0 * (per_sigma + per_rho) * LN_2) * tl.maximum(per_rho / per_sigma, 1.0)
        )
    return on_instance, on_consistency, tl.maximum(bound, 1e-30)


@triton.jit
def _coefficients(
    on_instance, on_consistency, statistics, rows, B, per_tau, per_sigma, smoothing,
    INSTANCE: tl.constexpr, CONSISTENCY: tl.constexpr, FORM: tl.constexpr, SMOOTHING: tl.constexpr,
    SQUARINGS: tl.constexpr,
):  # fmt: skip
    """All that G and H of a tile need from their rows, in the shape of `rows` so that it broadcasts."""
    inside = rows < B
    nothing = tl.zeros_like(on_instance)
    shift_w, shift_q, shift_p, at_q, at_p, even = nothing, nothing, nothing, nothing, nothing, nothing
    if INSTANCE:
        shift_w = tl.load(statistics + Z * B + rows, mask=inside, other=0.0)
        if SMOOTHING:
            even = on_instance * smoothing * tl.load(statistics + SHARE * B + rows, mask=inside, other=0.0)
    if CONSISTENCY:
        shift_q = tl.load(statistics + ZQ * B + rows, mask=inside, other=0.0)
        shift_p = tl.load(statistics + ZP * B + rows, mask=inside, other=0.0)
        mean_q = tl.load(statistics + MEAN_Q * B + rows, mask=inside, other=0.0)
        mean_p = tl.load(statistics + MEAN_P * B + rows, mask=inside, other=0.0)
        at_q = on_consistency * (mean_q if FORM == REVERSE else 1.0 + mean_q)
        at_p = on_consistency * (1.0 - mean_p if FORM == SYMMETRIC else -mean_p)
        if SQUARINGS >= 0:  # one exponential serves w and Q: Q_j to the power σ/τ, which is w_j up to a factor
            root = shift_q * (per_tau / per_sigma)
            if INSTANCE:
                on_instance *= tl.exp2(root - shift_w)
            shift_w = root
    slope = on_consistency * (per_sigma * LN_2)
    return on_instance, on_consistency, shift_w, shift_q, shift_p, at_q, at_p, slope, even


@triton.jit
def _weights(
    a, b, hidden, coefficients, per_tau, per_sigma, per_rho,
    INSTANCE: tl.constexpr, CONSISTENCY: tl.constexpr, FORM: tl.constexpr, TARGET: tl.constexpr,
    SMOOTHING: tl.constexpr,
    MASKED: tl.constexpr, SQUARINGS: tl.constexpr,
):  # fmt: skip
    """G and H of one tile, times the scale that is in the coefficients."""
    on_instance, on_consistency, shift_w, shift_q, shift_p, at_q, at_p, slope, even = coefficients
    grad_a = tl.zeros_like(a)
    grad_b = grad_a
    if INSTANCE or SQUARINGS >= 0:
        w = tl.exp2(a * per_tau - shift_w)
    if CONSISTENCY:
        if FORM != RELATION:
            if SQUARINGS >= 0:
                q_weight = _power(w, SQUARINGS)
            else:
                q_weight = tl.exp2(a * per_sigma - shift_q)
        p_weight = tl.exp2(b * per_rho - shift_p)
        ratio = per_rho / per_sigma
        if FORM == SYMMETRIC:
            sloped = slope * (b * ratio - a)  # (h/2σ) d
            grad_a = q_weight * (at_q - sloped) - on_consistency * p_weight
            if TARGET:
                grad_b = (p_weight * (at_p + sloped) - on_consistency * q_weight) * ratio
        elif FORM == KL:
            grad_a = on_consistency * (q_weight - p_weight)
            if TARGET:
                grad_b = p_weight * (at_p + slope * (b * ratio - a)) * ratio
        elif FORM == REVERSE:
            grad_a = q_weight * (at_q - slope * (b * ratio - a))
            if TARGET:
                grad_b = on_consistency * (p_weight - q_weight) * ratio
        else:
            grad_a = -on_consistency * p_weight
            if TARGET:
                grad_b = p_weight * (at_p - slope * a) * ratio
    if INSTANCE:
        grad_a += on_instance * w
        if SMOOTHING:
            grad_a -= even
            if MASKED:  # every other term is 0 already where a and b are hidden
                grad_a = tl.where(hidden, 0.0, grad_a)
    return grad_a, grad_b


@triton.jit
def backward_rows_kernel(
    operands, negatives, exclude, grad_instance, grad_consistency, statistics, partial,
    B, K, D, E, negatives_stride, exclude_stride, exclude_step, grad_instance_stride, grad_consistency_stride,
    tiles_per_split, per_tau, per_sigma, per_rho, smoothing,
    INSTANCE: tl.constexpr, CONSISTENCY: tl.constexpr, FORM: tl.constexpr, TARGET: tl.constexpr,
    SMOOTHING: tl.constexpr,
    EXCLUDE: tl.constexpr, SQUARINGS: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_D: tl.constexpr, ONE_D: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Σ_j G_j n_j, and with TARGET Σ_j H_j n_j, of BLOCK_B rows over one split of the negatives in BLOCK_D dims."""
    PARTS: tl.constexpr = 2 if CONSISTENCY else 1
    SUMS: tl.constexpr = 2 if TARGET else 1
    MASKED: tl.constexpr = EXCLUDE or not EVEN_K
    COMPUTE: tl.constexpr = operands.dtype.element_ty
    first_row = tl.program_id(0) * BLOCK_B
    rows = (first_row + tl.arange(0, BLOCK_B)).to(tl.int64)[:, None]  # [BLOCK_B, 1]
    split = tl.program_id(1)
    out_dim = tl.program_id(2) * BLOCK_D
    first_tile = split * tiles_per_split
    last_tile = tl.minimum(first_tile + tiles_per_split, tl.cdiv(K, BLOCK_K))
    inside = tl.arange(0, BLOCK_K)
    tile_pointer = negatives + first_tile.to(tl.int64) * BLOCK_K * negatives_stride

    on_instance, on_consistency, bound = _row_gradients(
        grad_instance, grad_consistency, grad_instance_stride, grad_consistency_stride, rows, B, per_tau, per_sigma,
        per_rho, INSTANCE, CONSISTENCY, FORM,
    )  # fmt: skip
    scale = WEIGHT_LIMIT / bound
    coefficients = _coefficients(
        on_instance * scale, on_consistency * scale, statistics, rows, B, per_tau, per_sigma, smoothing,
        INSTANCE, CONSISTENCY, FORM, SMOOTHING, SQUARINGS,
    )  # fmt: skip
    if ONE_D:
        qp = _load_operands(operands, first_row, B, 0, D, PARTS, EVEN_D, BLOCK_B, BLOCK_D)
    total = tl.zeros([SUMS * BLOCK_B, BLOCK_D], tl.float32)

    for tile in range(first_tile, last_tile):
        rest = K - tile * BLOCK_K
        if ONE_D:
            n = _load_negatives(tile_pointer, negatives_stride, inside, rest, 0, D, COMPUTE, EVEN_K, EVEN_D, BLOCK_D)
            both = tl.dot(qp, tl.trans(n), input_precision="ieee")
        else:
            both = _similarities(
                operands, first_row, tile_pointer, negatives_stride, inside, rest, B, D,
                PARTS, EVEN_K, EVEN_D, BLOCK_B, BLOCK_K, BLOCK_D,
            )  # fmt: skip
            n = _load_negatives(
                tile_pointer, negatives_stride, inside, rest, out_dim, D, COMPUTE, EVEN_K, EVEN_D, BLOCK_D
            )
        a, b = _unstack(both, PARTS)  # [BLOCK_B, BLOCK_K] each
        tile_pointer += BLOCK_K * negatives_stride
        hidden = rows < 0
        if MASKED:
            columns = (tile * BLOCK_K + inside)[None, :]
            hidden = _hidden(rows, columns, exclude, exclude_stride, exclude_step, B, K, E, EXCLUDE)
            a = tl.where(hidden, HIDDEN, a)
            b = tl.where(hidden, HIDDEN, b)
        weights, target_weights = _weights(
            a, b, hidden, coefficients, per_tau, per_sigma, per_rho,
            INSTANCE, CONSISTENCY, FORM, TARGET, SMOOTHING, MASKED, SQUARINGS,
        )  # fmt: skip
        if TARGET:
            weights = _stack(weights, target_weights)
        total = tl.dot(weights.to(COMPUTE), n, total, input_precision="ieee")

    dims = out_dim + tl.arange(0, BLOCK_D)[None, :]
    mask = (rows < B) & (dims < D)
    of_query, of_positive = _unstack(total, SUMS)
    unscale = bound * (1.0 / WEIGHT_LIMIT)
    out = partial + (split.to(tl.int64) * B + rows) * D + dims  # of [SUMS, splits, B, D]
    tl.store(out, of_query * unscale, mask=mask)
    if TARGET:
        tl.store(out + tl.num_programs(1).to(tl.int64) * B * D, of_positive * unscale, mask=mask)


@triton.jit
def merge_backward_kernel(
    partial, other, grad_instance, grad_consistency, statistics, grad,
    B, D, splits, other_stride, grad_instance_stride, grad_consistency_stride, per_tau, smoothing,
    SUMMED: tl.constexpr, INSTANCE: tl.constexpr, RELATED: tl.constexpr, SMOOTHING: tl.constexpr,
    BLOCK_SPLIT: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One row of ∂/∂q (or ∂/∂p): the partial sums, and S times the row of `other` that it is compared with."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = dims < D
    total = tl.zeros([BLOCK_D], tl.float32)
    if SUMMED:
        for first in range(0, splits, BLOCK_SPLIT):
            each = first + tl.arange(0, BLOCK_SPLIT)
            source = partial + (each.to(tl.int64)[:, None] * B + row) * D + dims[None, :]
            total += tl.sum(tl.load(source, mask=(each < splits)[:, None] & inside[None, :], other=0.0), axis=0)
    if INSTANCE:
        on_positive = tl.load(statistics + WEIGHT_POSITIVE * B + row) - 1.0
        if SMOOTHING:
            on_positive += smoothing * (1.0 - tl.load(statistics + SHARE * B + row))
        on_positive *= tl.load(grad_instance + row * grad_instance_stride).to(tl.float32) * (per_tau * LN_2)
        total += on_positive * tl.load(other + row * other_stride + dims, mask=inside, other=0.0).to(tl.float32)
    if RELATED:
        on_positive = tl.load(grad_consistency + row * grad_consistency_stride).to(tl.float32) * (per_tau * LN_2)
        on_positive *= tl.load(statistics + MEAN_Q * B + row)
        total += on_positive * tl.load(other + row * other_stride + dims, mask=inside, other=0.0).to(tl.float32)
    tl.store(grad + row * D + dims, total.to(grad.dtype.element_ty), mask=inside)


@triton.jit
def backward_negatives_kernel(
    operands, negatives, exclude, grad_instance, grad_consistency, statistics, grad_negatives,
    B, K, D, E, negatives_stride, exclude_stride, exclude_step, grad_instance_stride, grad_consistency_stride,
    per_tau, per_sigma, per_rho, smoothing,
    INSTANCE: tl.constexpr, CONSISTENCY: tl.constexpr, FORM: tl.constexpr, TARGET: tl.constexpr,
    SMOOTHING: tl.constexpr,
    EXCLUDE: tl.constexpr, SQUARINGS: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_D: tl.constexpr, ONE_D: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """∂/∂n of BLOCK_K negatives in BLOCK_D dimensions: [G H]ᵀ times queries above positives."""
    PARTS: tl.constexpr = 2 if CONSISTENCY else 1
    SUMS: tl.constexpr = 2 if TARGET else 1
    MASKED: tl.constexpr = EXCLUDE or not EVEN_K
    COMPUTE: tl.constexpr = operands.dtype.element_ty
    first_column = tl.program_id(0) * BLOCK_K
    inside = tl.arange(0, BLOCK_K)
    out_dim = tl.program_id(1) * BLOCK_D
    tile_pointer = negatives + first_column.to(tl.int64) * negatives_stride
    rest = K - first_column

    # The product sums over rows, so all of them share one scale.
    largest = 1e-30
    for first_row in range(0, B, 256):
        rows = first_row + tl.arange(0, 256).to(tl.int64)
        _, _, bound = _row_gradients(
            grad_instance, grad_consistency, grad_instance_stride, grad_consistency_stride, rows, B, per_tau, per_sigma,
            per_rho, INSTANCE, CONSISTENCY, FORM,
        )  # fmt: skip
        largest = tl.maximum(largest, tl.max(bound, axis=0))
    scale = WEIGHT_LIMIT / largest

    if ONE_D:
        n = _load_negatives(tile_pointer, negatives_stride, inside, rest, 0, D, COMPUTE, EVEN_K, EVEN_D, BLOCK_D)
    total = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    for first_row in range(0, B, BLOCK_B):
        rows = (first_row + tl.arange(0, BLOCK_B)).to(tl.int64)[:, None]  # [BLOCK_B, 1]
        if ONE_D:
            qp = _load_operands(operands, first_row, B, 0, D, PARTS, EVEN_D, BLOCK_B, BLOCK_D)
            both = tl.dot(qp, tl.trans(n), input_precision="ieee")
        else:
            both = _similarities(
                operands, first_row, tile_pointer, negatives_stride, inside, rest, B, D,
                PARTS, EVEN_K, EVEN_D, BLOCK_B, BLOCK_K, BLOCK_D,
            )  # fmt: skip
        if not (ONE_D and SUMS == PARTS):
            qp = _load_operands(operands, first_row, B, out_dim, D, SUMS, EVEN_D, BLOCK_B, BLOCK_D)
        a, b = _unstack(both, PARTS)  # [BLOCK_B, BLOCK_K] each
        hidden = rows < 0
        if MASKED:
            columns = (first_column + inside)[None, :]
            hidden = _hidden(rows, columns, exclude, exclude_stride, exclude_step, B, K, E, EXCLUDE)
            a = tl.where(hidden, HIDDEN, a)
            b = tl.where(hidden, HIDDEN, b)
        on_instance, on_consistency, _ = _row_gradients(
            grad_instance, grad_consistency, grad_instance_stride, grad_consistency_stride, rows, B, per_tau, per_sigma,
            per_rho, INSTANCE, CONSISTENCY, FORM,
        )  # fmt: skip
        coefficients = _coefficients(
            on_instance * scale, on_consistency * scale, statistics, rows, B, per_tau, per_sigma, smoothing,
            INSTANCE, CONSISTENCY, FORM, SMOOTHING, SQUARINGS,
        )  # fmt: skip
        weights, target_weights = _weights(
            a, b, hidden, coefficients, per_tau, per_sigma, per_rho,
            INSTANCE, CONSISTENCY, FORM, TARGET, SMOOTHING, MASKED, SQUARINGS,
        )  # fmt: skip
        if TARGET:
            weights = _stack(weights, target_weights)
        total = tl.dot(tl.trans(weights.to(COMPUTE)), qp, total, input_precision="ieee")

    dims = out_dim + tl.arange(0, BLOCK_D)[None, :]
    columns = (first_column + inside).to(tl.int64)[:, None]
    out = grad_negatives + columns * D + dims
    gradient = total * (largest * (1.0 / WEIGHT_LIMIT))
    tl.store(out, gradient.to(grad_negatives.dtype.element_ty), mask=(columns < K) & (dims < D))
