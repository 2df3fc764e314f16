/*
 * Online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) of one row: what its running
 * maximum and sum are used for.
 */
#ifndef FA_KERNEL_SOFTMAX_H
#define FA_KERNEL_SOFTMAX_H

#include "common/device.cuh"

#define FA_LOG2E 1.44269504088896340736f

/* exp(x - base) with 2 ulp of the exponential itself. */
FA_DEVICE float fa_weight(float x, float base) { return exp2f((x - base) * FA_LOG2E); }

/* What is subtracted: nothing from a row that has seen nothing, whose weights are 0, not NaN. */
FA_DEVICE float fa_softmax_base(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

/* What earlier sums must be scaled by when the maximum grows. */
FA_DEVICE float fa_softmax_rescale(float old, float base)
{
    return old == -INFINITY ? 0.0f : fa_weight(old, base);
}

/* At the end of a row: the factor of the unnormalized output, 0 for a row that saw no key, and the
 * log-sum-exp. sink is -infinity if there is none. */
FA_DEVICE float fa_softmax_finish(float maximum, float sum, float sink, float *lse)
{
    float top = maximum, weight = 1.0f;
    if (sink != -INFINITY) {
        float joint = fmaxf(top, sink);
        weight = expf(top - joint);
        sum = sum * weight + expf(sink - joint);
        top = joint;
    }
    *lse = sum == 0.0f ? -INFINITY : top + logf(sum);
    if (maximum == -INFINITY && !isnan(sum)) return 0.0f;
    return weight / sum;
}

#endif
