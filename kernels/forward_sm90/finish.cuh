/*
 * The end of a row, from its base and its sum of weights: the factor of its outputs, and the log-sum-exp.
 */
#ifndef FA_KERNELS_FORWARD_SM90_FINISH_CUH
#define FA_KERNELS_FORWARD_SM90_FINISH_CUH

#include "common/device.cuh"
#include "common/softmax.cuh"

/* The base of a row that has seen no key: no score is below it, and the weight of -infinity is still 0. */
#define NO_KEY_SEEN (-3.402823466e38f)

/* The exponent of x as a power of two, 0 if it has none; and 2^-e. */
FA_DEVICE int exponent_of(float x)
{
    const int e = (__float_as_int(x) >> 23) - 127;
    return e > -127 && e < 127 ? e : 0;
}

FA_DEVICE float inverse_power(int e) { return __int_as_float((127 - e) << 23); }

/* natural: the base is a logit instead of an exponent of 2. The sum's power of two is moved to the base. Otherwise the
 * base and the log of the sum could both be much larger than their sum, and lse would lose digits by cancellation. */
FA_DEVICE float finish_sum(float base, float sum, float sink, bool natural, float *lse)
{
    const float ln2 = 0.69314718055994530942f;
    const int e = exponent_of(sum);
    const float down = inverse_power(e);
    const float top = base == NO_KEY_SEEN ? -INFINITY
                      : natural           ? fmaf((float)e, ln2, base)
                                          : (base + (float)e) * ln2;
    return fa_softmax_finish(top, sum * down, sink, lse) * down;
}

#endif
