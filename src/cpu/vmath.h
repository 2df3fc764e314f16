/*
 * Vector exponential and hyperbolic tangent. The polynomials are minimax fits of this project (Remez, in
 * extended precision); tests/c/test_exp.c measures the error.
 */
#ifndef FA_CPU_VMATH_H
#define FA_CPU_VMATH_H

#include "simd.h"

#define FA_LOG2E 1.44269504088896340736f

/* 2^(y*c) for y*c <= 0 (or NaN, -infinity), c > 0 finite; at most 1 ulp off for results of 2^-126 and
 * more, below that absolutely small. lowest: about -150/c; smaller y give 0.
 *
 * y*c = n + r with n integral and |r| <= 1/2. r comes from y itself by one fused step, so that the
 * rounding of y*c costs nothing; 2^r = 1 + r*P(r), |error| < 2.6e-9 relative. */
FA_INLINE vf v_exp2_nonpositive(vf y, vf c, vf lowest)
{
    y = v_max(lowest, y); /* keeps NaN */
    const vf magic =
        v_set1(0x1.8p23f); /* adding it rounds to an integer: |y*c| is far below 2^22 */
    vf n = v_sub(v_fma(y, c, magic), magic);
    vf r = v_fms(y, c, n);
    vf p = v_set1(1.55946770e-4f);
    p = v_fma(p, r, v_set1(1.34066438e-3f));
    p = v_fma(p, r, v_set1(9.61769298e-3f));
    p = v_fma(p, r, v_set1(5.55031055e-2f));
    p = v_fma(p, r, v_set1(2.40226528e-1f));
    p = v_fma(p, r, v_set1(6.93147215e-1f));
    p = v_fma(p, r, v_set1(1.0f));
    return v_scale(p, n);
}

FA_INLINE float fa_exp2_lowest(float c) { return -151.0f / c; }

/* The same for any y: +infinity above 2^128. */
FA_INLINE vf v_exp2(vf y, vf c, vf lowest)
{
    vf highest = v_mul(lowest, v_set1(-129.0f / 151.0f));
    return v_exp2_nonpositive(v_min(highest, y), c, lowest);
}

/* tanh(x): near 0 an odd polynomial, elsewhere 1 - 2/(e^2x + 1); error under 4e-7 relative. */
FA_INLINE vf v_tanh(vf x)
{
    vf t = v_mul(x, x);
    vf p = v_set1(-5.52863475e-3f);
    p = v_fma(p, t, v_set1(2.04833173e-2f));
    p = v_fma(p, t, v_set1(-5.36929685e-2f));
    p = v_fma(p, t, v_set1(1.33308998e-1f));
    p = v_fma(p, t, v_set1(-3.33332629e-1f));
    vf near = v_fma(v_mul(p, t), x, x);
    vf a = v_abs(x);
    const vf c = v_set1(2.0f * FA_LOG2E), one = v_set1(1.0f);
    vf e = v_exp2_nonpositive(v_sub(v_zero(), a), c, v_set1(-151.0f / (2.0f * FA_LOG2E)));
    vf far = v_div(v_sub(one, e), v_add(one, e)); /* of |x| */
    far = v_select(v_less(x, v_zero()), v_sub(v_zero(), far), far);
    return v_select(v_less(a, v_set1(0.65f)), near, far);
}

#endif
