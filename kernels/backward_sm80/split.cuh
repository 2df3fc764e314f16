/*
 * Float32 numbers as float16 parts, and the powers of two that they are multiplied by first.
 * high_low.cuh says where the parts lie. `prepare` splits queries and dout, the kernels keys and
 * values.
 */
#ifndef FA_KERNELS_BACKWARD_SM80_SPLIT_CUH
#define FA_KERNELS_BACKWARD_SM80_SPLIT_CUH

#include "backward_sm80/backward_sm80.h"
#include "common/device.cuh"
#include "common/params.h"
#include "common/rows.cuh"
#include "ptx/convert.cuh"

/* A row's largest number becomes 2^SPLIT_BITS or more, less than twice that. */
enum { SPLIT_BITS = 14 };

/* The power of two that brings a number there, or not as far if it is tiny: 1 / power and
 * 2^-SPLIT_BITS / power are normal numbers. */
FA_DEVICE float find_power(float largest)
{
    const int exponent = (int)(__float_as_uint(largest) >> 23) - 127;
    return fa_bits_float((uint32_t)(127 + SPLIT_BITS - max(exponent, -96)) << 23);
}

/* 1 / a power of two. */
FA_DEVICE float invert_power(float power)
{
    return fa_bits_float((254u << 23) - __float_as_uint(power));
}

/* What weights or dS with a row's inverse power are multiplied by. The two together are near the row's largest number: so what is
 * split leaves the range of float32 only where a gradient does. */
#define SPLIT_UNIT ((float)(1 << SPLIT_BITS))

/* A sum of products of parts is multiplied by the inverse powers of a key and of a query, one after the
 * other. The inverses go from 2^-110 to 2^113, and the sum to 2^39: it could become infinite between the
 * two, where the second one brings it back. So inverses of keys and values are stored times KEY_UNIT,
 * those of queries and dout times SPLIT_UNIT. Scores and dP are SCORE_UNIT times what they are until a
 * factor that they have anyway makes up for it: they are infinite where they should be. What is lost
 * below the smallest float is, of dP, 2^-139 at most or 2^-43 of the product of the two rows' largest
 * numbers. */
#define SCORE_UNIT (1.0f / (1 << FA_BACKWARD_SM80_SCORE_BITS))
#define KEY_UNIT (SCORE_UNIT / SPLIT_UNIT)

/* What a sum of products with an operand of that power is multiplied by to be part of a gradient. */
FA_DEVICE float find_gradient_factor(float power)
{
    return invert_power(power) * (1.0f / SPLIT_UNIT);
}

/* The power of an operand of that factor. */
FA_DEVICE float find_factor_power(float factor) { return invert_power(factor * SPLIT_UNIT); }

/* The larger one, unless the second is not finite. largest is not negative. */
FA_DEVICE float find_larger(float largest, float x)
{
    return fabsf(x) < INFINITY ? fmaxf(largest, fabsf(x)) : largest;
}

/* The high parts of two numbers, and their low ones. The rest of an infinity is NaN. */
FA_DEVICE uint32_t split_two(float x, float y, uint32_t *low)
{
    const uint32_t high = ptx_pack_f16x2(x, y);
    const float2 z = fa_unpack_x2(high, FA_KERNEL_FLOAT16);
    *low = ptx_pack_f16x2(x - z.x, y - z.y);
    return high;
}

#endif
