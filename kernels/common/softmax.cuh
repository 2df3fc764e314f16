/* Online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) of one row: weights, rescaling, and the end of
 * a row. */
#ifndef FA_KERNELS_COMMON_SOFTMAX_CUH
#define FA_KERNELS_COMMON_SOFTMAX_CUH

#include "common/device.cuh"

#define FA_LOG2E 1.44269504088896340736f

/* exp(x - base); the exponential has an error of 2 ulp. */
FA_DEVICE float fa_weight(float x, float base) { return exp2f((x - base) * FA_LOG2E); }

/* The base of a row with this max. A row that has seen no key has base 0: then its weights are 0, not NaN. */
FA_DEVICE float fa_softmax_base(float max) { return max == -INFINITY ? 0.0f : max; }

/* The factor of earlier sums when the max grows. */
FA_DEVICE float fa_softmax_rescale(float old, float base)
{
    return old == -INFINITY ? 0.0f : fa_weight(old, base);
}

/* sum += x, and the rounding error is added to `rest`. It is what the new sum lacks of x and of the old sum (Knuth, The
 * Art of Computer Programming, volume 2, section 4.2.2). */
FA_DEVICE void fa_add_exactly(float *sum, float *rest, float x)
{
    const float old = *sum, joint = old + x, added = joint - old;
    *rest += (old - (joint - added)) + (x - added);
    *sum = joint;
}

/* At the end of a row: the factor of its unnormalized output (0 for a row that has seen no key) and its
 * log-sum-exp. sink: -infinity if there is none. */
FA_DEVICE float fa_softmax_finish(float max, float sum, float sink, float *lse)
{
    float top = max, weight = 1.0f;
    if (sink != -INFINITY) {
        float joint = fmaxf(top, sink);
        weight = expf(top - joint);
        sum = sum * weight + expf(sink - joint);
        top = joint;
    }
    *lse = sum == 0.0f ? -INFINITY : top + logf(sum);
    if (max == -INFINITY && !isnan(sum)) return 0.0f;
    return weight / sum;
}

#endif
