/*
 * Float32 numbers as float16 parts, and the powers of two by which they are multiplied first.
 * high_low.cuh explains where the parts are. `prepare` splits queries and dout; the kernels split
 * keys and values.
 */
#ifndef FA_KERNELS_BACKWARD_SM80_SPLIT_CUH
#define FA_KERNELS_BACKWARD_SM80_SPLIT_CUH

#include "backward_sm80/backward_sm80.h"
#include "common/device.cuh"
#include "common/params.h"
#include "common/rows.cuh"
#include "ptx/convert.cuh"

/* A row's largest number is scaled to the range from 2^SPLIT_BITS up to twice that. */
enum { SPLIT_BITS = 14 };

/* The power of two that scales a number to this range, or less far if it is tiny: 1 / power and
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

/* The factor of weights or dS with a row's inverse power. The product of the two is near the row's
 * largest number. So what is split leaves the range of float32 only if a gradient does. */
#define SPLIT_UNIT ((float)(1 << SPLIT_BITS))

/* A sum of products of parts is multiplied by the inverse powers of a key and of a query, one after
 * the other. The inverses range from 2^-110 to 2^113, and the sum to 2^39: after the first factor
 * it could be infinite, although the second one would bring it back. So inverses of keys and values
 * are stored times KEY_UNIT, those of queries and dout times SPLIT_UNIT. Scores and dP are
 * SCORE_UNIT times as large until another factor, which they have anyway, restores them: so they
 * are infinite only if they should be. What is lost of dP below the smallest float is 2^-139 at
 * most, or 2^-43 of the product of the two rows' largest numbers. */
#define SCORE_UNIT (1.0f / (1 << FA_BACKWARD_SM80_SCORE_BITS))
#define KEY_UNIT (SCORE_UNIT / SPLIT_UNIT)

/* The factor of a sum of products with an operand of that power, when it is added to a gradient. */
FA_DEVICE float find_gradient_factor(float power)
{
    return invert_power(power) * (1.0f / SPLIT_UNIT);
}

/* The power of an operand of that factor. */
FA_DEVICE float find_factor_power(float factor) { return invert_power(factor * SPLIT_UNIT); }

/* The larger of the two, unless the second is not finite. largest is not negative. */
FA_DEVICE float find_larger(float largest, float x)
{
    return fabsf(x) < INFINITY ? fmaxf(largest, fabsf(x)) : largest;
}

/* Returns the high parts of two numbers, and their low parts in `low`. The low part of an infinity
 * is NaN. */
FA_DEVICE uint32_t split_two(float x, float y, uint32_t *low)
{
    const uint32_t high = ptx_pack_f16x2(x, y);
    const float2 z = fa_unpack_x2(high, FA_KERNEL_FLOAT16);
    *low = ptx_pack_f16x2(x - z.x, y - z.y);
    return high;
}

/* Two words of parts of one of the four columns of 32, which are 8 bytes. */
typedef struct lane_parts {
    uint32_t high[2], low[2];
} lane_parts;

/* Of a lane's unit of four columns: word t of a column has numbers of unit t and of unit 4 + (t ^ 1), whose lanes are t and
 * t ^ 5 of eight. */
FA_DEVICE int word_of_lane(int lane) { return lane & 4 ? lane % 8 ^ 5 : lane % 8; }

/* Where the parts that split_unit returns are in 64 bytes: unit (of 16 bytes) and byte. */
FA_DEVICE int unit_of_parts(int lane) { return (lane & 4 ? 2 : 0) + (word_of_lane(lane) & 1); }
FA_DEVICE int byte_in_unit(int lane) { return (word_of_lane(lane) & 2) * 4; }

/* Splits units of which each lane has one. Eight neighbouring lanes have 32 columns, and exchange halves: first the two
 * lanes of a word, then those of neighbouring words. */
FA_DEVICE lane_parts split_unit(float4 unit, float power, int lane)
{
    const bool second = (lane & 4) != 0, odd = (word_of_lane(lane) & 1) != 0;
    const float own[4] = {unit.x * power, unit.y * power, unit.z * power, unit.w * power};
    uint32_t high[2], low[2];
    lane_parts parts;
#pragma unroll
    for (int c = 0; c < 2; c++) {
        const float kept = second ? own[2 + c] : own[c],
                    other = __shfl_xor_sync(0xffffffffu, second ? own[c] : own[2 + c], 5);
        high[c] = split_two(second ? other : kept, second ? kept : other, &low[c]);
    }
    const uint32_t high_of_other = __shfl_xor_sync(0xffffffffu, odd ? high[0] : high[1], 1),
                   low_of_other = __shfl_xor_sync(0xffffffffu, odd ? low[0] : low[1], 1);
    parts.high[0] = odd ? high_of_other : high[0];
    parts.high[1] = odd ? high[1] : high_of_other;
    parts.low[0] = odd ? low_of_other : low[0];
    parts.low[1] = odd ? low[1] : low_of_other;
    return parts;
}

#endif
