"""Triton kernels of the step on spheres: two row kernels around grouped products, and AdamW.

The readable reference is ``spheres`` and ``spectral``; ``fused`` lays out the tables of addresses
that let each kernel serve all weights at once, whatever their shapes and memory formats:

1. ``momentum`` reads g, m and w row by row and writes m, u (as bfloat16) and the share of the
angle; 2. ``gram``, ``product`` and ``apply`` orthogonalise u by the Gram form of Newton-Schulz
iterations; 3. ``rotate`` projects the result and rotates every row by its angle; 4. ``count`` and
``adamw`` step the parameters that are not on spheres.

Products of Gram matrices are polynomials of one symmetric matrix: they commute and are symmetric,
so that only tiles on and below the diagonal are computed. Sides of matrices in scratch memory are
rounded up to multiples of 64, with zeros behind them, so that products need no masks: what a
polynomial has there, on the diagonal, is multiplied by zeros.

A gradient that is not finite raises a flag on the device: from then on no weight moves, until the
flag is read.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _radius(norm2):
    """The norm rounded to 18 binary digits: a fixed point, so that norms never drift."""
    bits = tl.sqrt(norm2).to(tl.int32, bitcast=True)
    return ((bits + 32) & -64).to(tl.float32, bitcast=True)


@triton.jit
def _row(address, start, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer to a row, at multiples of 16 bytes where four elements are read at once."""
    pointer = address.to(tl.pointer_type(TYPE))
    if ALIGNED == 4:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + start


@triton.jit
def momentum(
    rows,
    addresses,
    gradients,
    numbers,
    scratch,
    squares,
    shares,
    flag,
    first,
    MARGIN: tl.constexpr,
    NESTEROV: tl.constexpr,
    GRADIENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """S = r g, m <- beta m + s, u = s + beta m, and the share of the angle of a row."""
    row = first + tl.program_id(0)
    which = tl.load(rows + 4 * row)
    length = tl.multiple_of(tl.load(rows + 4 * row + 2), ALIGNED)
    start = tl.multiple_of(tl.load(rows + 4 * row + 1) * length, ALIGNED)
    out = scratch + tl.multiple_of(tl.load(rows + 4 * row + 3), 16)
    address = tl.load(gradients + which)
    square = 0.0
    share = 0.0
    stands = 1
    if (address != 0) & (tl.load(flag) == 0):
        w = _row(tl.load(addresses + 2 * which), start, tl.float32, ALIGNED)
        m = _row(tl.load(addresses + 2 * which + 1), start, tl.float32, ALIGNED)
        g = _row(address, start, GRADIENT, ALIGNED)
        beta = tl.load(numbers + 2 * which + 1)
        ww = tl.zeros([CHUNK], tl.float32)
        wg = tl.zeros([CHUNK], tl.float32)
        for begin in range(0, length, CHUNK):
            at = begin + tl.arange(0, CHUNK)
            inside = at < length
            w_ = tl.load(w + at, inside, 0.0)
            ww += w_ * w_
            wg += w_ * tl.load(g + at, inside, 0.0).to(tl.float32)
        norm2 = tl.sum(ww)
        radius = _radius(norm2)
        # not finite if an entry of g is not, as w g is not even where w is zero
        if tl.abs(tl.sum(wg)) < float("inf"):
            ss = tl.zeros([CHUNK], tl.float32)
            uu = tl.zeros([CHUNK], tl.float32)
            for begin in range(0, length, CHUNK):
                at = begin + tl.arange(0, CHUNK)
                inside = at < length
                s_ = radius * tl.load(g + at, inside, 0.0).to(tl.float32)
                m_ = beta * tl.load(m + at, inside, 0.0) + s_
                u_ = m_
                if NESTEROV:
                    u_ = s_ + beta * m_
                tl.store(m + at, m_, inside)
                tl.store(out + at, u_.to(scratch.dtype.element_ty), inside)
                ss += s_ * s_
                uu += u_ * u_
            stands = 0
            square = tl.sum(uu)
            ratio = tl.sqrt(tl.sum(ss) / tl.maximum(square, 1e-37))
            share = tl.minimum(MARGIN / (1.0 - beta) * ratio, 1.0)
        else:
            tl.atomic_max(flag, which + 1)
    if stands == 1:
        # what an earlier step has left would be divided by a norm that it does not have
        for begin in range(0, length, CHUNK):
            at = begin + tl.arange(0, CHUNK)
            tl.store(out + at, tl.zeros([CHUNK], scratch.dtype.element_ty), at < length)
    tl.store(squares + row, square)
    tl.store(shares + row, share)


@triton.jit
def rotate(
    rows,
    addresses,
    gradients,
    numbers,
    scratch,
    squares,
    shares,
    flag,
    first,
    MAX_ANGLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Rotate each row by its angle against the tangent part of its direction."""
    row = first + tl.program_id(0)
    which = tl.load(rows + 4 * row)
    angle = tl.minimum(tl.load(shares + row) * tl.load(numbers + 2 * which), MAX_ANGLE)
    if (angle > 0.0) & (tl.load(flag) == 0):
        length = tl.multiple_of(tl.load(rows + 4 * row + 2), ALIGNED)
        start = tl.multiple_of(tl.load(rows + 4 * row + 1) * length, ALIGNED)
        d = scratch + tl.multiple_of(tl.load(rows + 4 * row + 3), 16)
        w = _row(tl.load(addresses + 2 * which), start, tl.float32, ALIGNED)
        ww = tl.zeros([CHUNK], tl.float32)
        wd = tl.zeros([CHUNK], tl.float32)
        dd = tl.zeros([CHUNK], tl.float32)
        for begin in range(0, length, CHUNK):
            at = begin + tl.arange(0, CHUNK)
            inside = at < length
            w_ = tl.load(w + at, inside, 0.0)
            d_ = tl.load(d + at, inside, 0.0).to(tl.float32)
            ww += w_ * w_
            wd += w_ * d_
            dd += d_ * d_
        norm2 = tl.sum(ww)
        along = tl.sum(wd) / tl.maximum(norm2, 1e-37)
        whole = tl.sum(dd)
        tangent2 = whole - along * along * norm2
        # what is left of a radial direction is rounding
        if tangent2 > 1e-6 * whole:
            norm = tl.sqrt(norm2)
            sine = tl.sin(angle) * norm / tl.sqrt(tangent2)
            scale = _radius(norm2) / norm
            of_w = scale * (tl.cos(angle) + sine * along)
            of_d = scale * sine
            for begin in range(0, length, CHUNK):
                at = begin + tl.arange(0, CHUNK)
                inside = at < length
                w_ = tl.load(w + at, inside, 0.0)
                d_ = tl.load(d + at, inside, 0.0).to(tl.float32)
                tl.store(w + at, of_w * w_ - of_d * d_, inside)


@triton.jit
def _square_norm(squares, matrices, k):
    """The sum of the squares of the rows of a matrix, at least the smallest number to divide by."""
    first = tl.load(matrices + 7 * k + 5)
    height = tl.load(matrices + 7 * k + 6)
    total = tl.zeros([1024], tl.float32)
    for begin in range(0, height, 1024):
        at = begin + tl.arange(0, 1024)
        total += tl.load(squares + first + at, at < height, 0.0)
    return tl.maximum(tl.sum(total), 1e-37)


@triton.jit
def gram(
    source,
    gram,
    squares,
    matrices,
    tiles,
    SCALED: tl.constexpr,
    TALL: tl.constexpr,
    SIDE: tl.constexpr,
):
    """G = x xᵀ over the long side, divided by the square of the norm where x is not yet scaled."""
    tile = tiles + 3 * tl.program_id(0)
    k = tl.load(tile)
    long = tl.load(matrices + 7 * k + 1)
    stride = tl.multiple_of(tl.load(matrices + 7 * k + 2), 64)
    x = source + tl.multiple_of(tl.load(matrices + 7 * k + 3), 64)
    i = tl.load(tile + 1) * SIDE + tl.arange(0, SIDE)
    j = tl.load(tile + 2) * SIDE + tl.arange(0, SIDE)
    at = tl.arange(0, SIDE)
    if TALL:
        left = x + at[None, :] * stride + i[:, None]
        right = x + at[:, None] * stride + j[None, :]
        advance = SIDE * stride
    else:
        left = x + i[:, None] * stride + at[None, :]
        right = x + j[None, :] * stride + at[:, None]
        advance = SIDE
    total = tl.zeros([SIDE, SIDE], tl.float32)
    for _ in range(0, long, SIDE):
        total = tl.dot(tl.load(left), tl.load(right), total)
        left += advance
        right += advance
    if SCALED:
        total = total / _square_norm(squares, matrices, k)
    _store_symmetric(gram, total, matrices, k, i, j, tl.float16)


@triton.jit
def _store_symmetric(gram, total, matrices, k, i, j, TO: tl.constexpr):
    """Write a tile on or below the diagonal of a Gram matrix, and its mirror image."""
    stride = tl.multiple_of((tl.load(matrices + 7 * k) + 63) // 64 * 64, 64)
    to = (gram + tl.multiple_of(tl.load(matrices + 7 * k + 4), 64)).to(tl.pointer_type(TO))
    half = total.to(TO)
    tl.store(to + i[:, None] * stride + j[None, :], half)
    tl.store(to + j[:, None] * stride + i[None, :], tl.trans(half))


@triton.jit
def product(
    grams,
    size,
    code,
    matrices,
    tiles,
    a,
    b,
    c,
    POLYNOMIAL: tl.constexpr,
    TO: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Products of Gram matrices that commute: two at a time, or the polynomial aI + bG + cG².

    The buffers of a product are three octal digits of ``code``, those of the second product the
    next three.
    """
    tile = tiles + 3 * tl.program_id(0)
    k = tl.load(tile)
    code = code >> (9 * tl.program_id(1))
    offset = tl.load(matrices + 7 * k + 4)
    left = grams + tl.multiple_of((code & 7).to(tl.int64) * size + offset, 64)
    right = grams + tl.multiple_of((code >> 3 & 7).to(tl.int64) * size + offset, 64)
    to = grams + tl.multiple_of((code >> 6 & 7).to(tl.int64) * size, 64)
    stride = tl.multiple_of((tl.load(matrices + 7 * k) + 63) // 64 * 64, 64)
    i = tl.load(tile + 1) * SIDE + tl.arange(0, SIDE)
    j = tl.load(tile + 2) * SIDE + tl.arange(0, SIDE)
    at = tl.arange(0, SIDE)
    x = left + i[:, None] * stride + at[None, :]
    y = right + j[None, :] * stride + at[:, None]
    total = tl.zeros([SIDE, SIDE], tl.float32)
    for _ in range(0, stride, SIDE):
        total = tl.dot(tl.load(x), tl.load(y), total)
        x += SIDE
        y += SIDE
    if POLYNOMIAL:
        g = tl.load(left + i[:, None] * stride + j[None, :]).to(tl.float32)
        total = c * total + b * g + tl.where(i[:, None] == j[None, :], a, 0.0)
    _store_symmetric(to, total, matrices, k, i, j, TO)


@triton.jit
def apply(
    source,
    gram,
    to,
    squares,
    matrices,
    tiles,
    SCALED: tl.constexpr,
    TALL: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Q x, divided by the norm where x is not yet scaled."""
    tile = tiles + 3 * tl.program_id(0)
    k = tl.load(tile)
    short = tl.load(matrices + 7 * k)
    stride = tl.multiple_of(tl.load(matrices + 7 * k + 2), 64)
    offset = tl.multiple_of(tl.load(matrices + 7 * k + 3), 64)
    q = gram + tl.multiple_of(tl.load(matrices + 7 * k + 4), 64)
    of_q = tl.multiple_of((short + 63) // 64 * 64, 64)
    i = tl.load(tile + 1) * SIDE + tl.arange(0, SIDE)
    j = tl.load(tile + 2) * SIDE + tl.arange(0, SIDE)
    at = tl.arange(0, SIDE)
    total = tl.zeros([SIDE, SIDE], tl.float32)
    if TALL:
        x = source + offset + j[:, None] * stride + at[None, :]
        y = q + i[None, :] * of_q + at[:, None]
        for _ in range(0, short, SIDE):
            total = tl.dot(tl.load(x), tl.load(y), total)
            x += SIDE
            y += SIDE
        where = j[:, None] * stride + i[None, :]
    else:
        x = q + i[:, None] * of_q + at[None, :]
        y = source + offset + at[:, None] * stride + j[None, :]
        for _ in range(0, short, SIDE):
            total = tl.dot(tl.load(x), tl.load(y), total)
            x += SIDE
            y += SIDE * stride
        where = i[:, None] * stride + j[None, :]
    if SCALED:
        total = total / tl.sqrt(_square_norm(squares, matrices, k))
    tl.store(to + offset + where, total.to(to.dtype.element_ty))


@triton.jit
def count(chunks, gradients, steps, flag, before, GRADIENT: tl.constexpr, CHUNK: tl.constexpr):
    """Raise the flag for gradients that are not finite, and count each parameter's step once."""
    which = tl.load(chunks + 3 * tl.program_id(0)).to(tl.int64)
    begin = tl.load(chunks + 3 * tl.program_id(0) + 1)
    length = tl.load(chunks + 3 * tl.program_id(0) + 2)
    address = tl.load(gradients + which)
    if address != 0:
        at = begin + tl.arange(0, CHUNK)
        g = tl.load(address.to(tl.pointer_type(GRADIENT)) + at, at < length, 0.0).to(tl.float32)
        if tl.sum((tl.abs(g) < float("inf")).to(tl.int32)) != CHUNK:
            tl.atomic_max(flag, before + which.to(tl.int32) + 1)
        if (begin == 0) & (tl.load(flag) == 0):
            step = tl.load(steps + which).to(tl.pointer_type(tl.float32))
            tl.store(step, tl.load(step) + 1.0)


@triton.jit
def adamw(
    chunks, gradients, steps, addresses, numbers, flag, GRADIENT: tl.constexpr, CHUNK: tl.constexpr
):
    """AdamW on a chunk of a parameter; numbers are rate, decay, β₁, β₂ and ε."""
    which = tl.load(chunks + 3 * tl.program_id(0)).to(tl.int64)
    begin = tl.load(chunks + 3 * tl.program_id(0) + 1)
    length = tl.load(chunks + 3 * tl.program_id(0) + 2)
    address = tl.load(gradients + which)
    if (address != 0) & (tl.load(flag) == 0):
        at = begin + tl.arange(0, CHUNK)
        inside = at < length
        w = tl.load(addresses + 3 * which).to(tl.pointer_type(tl.float32)) + at
        m = tl.load(addresses + 3 * which + 1).to(tl.pointer_type(tl.float32)) + at
        v = tl.load(addresses + 3 * which + 2).to(tl.pointer_type(tl.float32)) + at
        g = tl.load(address.to(tl.pointer_type(GRADIENT)) + at, inside, 0.0).to(tl.float32)
        rate = tl.load(numbers + 5 * which)
        decay = tl.load(numbers + 5 * which + 1)
        beta1 = tl.load(numbers + 5 * which + 2)
        beta2 = tl.load(numbers + 5 * which + 3)
        epsilon = tl.load(numbers + 5 * which + 4)
        step = tl.load(tl.load(steps + which).to(tl.pointer_type(tl.float32)))
        first = 1.0 - tl.exp(step * tl.log(beta1))
        second = 1.0 - tl.exp(step * tl.log(beta2))
        m_ = tl.load(m, inside, 0.0)
        m_ += (1.0 - beta1) * (g - m_)
        v_ = tl.load(v, inside, 0.0)
        v_ += (1.0 - beta2) * (g * g - v_)
        tl.store(m, m_, inside)
        tl.store(v, v_, inside)
        w_ = tl.load(w, inside, 0.0)
        change = m_ / first / (tl.sqrt(v_ / second) + epsilon)
        tl.store(w, w_ - rate * (decay * w_ + change), inside)
