/*
 * Scalar conversions between float32 and the 16-bit and 8-bit types, round to nearest even.
 */
#ifndef FA_CONVERT_H
#define FA_CONVERT_H

#include <stdint.h>
#include <string.h>

/* Kernels define this themselves before they include this header. */
#ifndef FA_SHARED_FUNCTION
#define FA_SHARED_FUNCTION static inline
#endif

FA_SHARED_FUNCTION uint32_t fa_float_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

FA_SHARED_FUNCTION float fa_bits_float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

FA_SHARED_FUNCTION float fa_bfloat_to_float(uint16_t b) { return fa_bits_float((uint32_t)b << 16); }

FA_SHARED_FUNCTION uint16_t fa_float_to_bfloat(float x)
{
    uint32_t bits = fa_float_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40u); /* quiet NaN */
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

FA_SHARED_FUNCTION float fa_half_to_float(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t magnitude = (uint32_t)(h & 0x7fffu);
    if (magnitude >= 0x7c00u) /* infinity or NaN: widen the exponent */
        return fa_bits_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    /* After the shift the exponent is 112 too small. A multiplication corrects it, also for
     * subnormals. */
    return fa_bits_float(sign | fa_float_bits(fa_bits_float(magnitude << 13) * 0x1p112f));
}

FA_SHARED_FUNCTION uint16_t fa_float_to_half(float x)
{
    uint32_t bits = fa_float_bits(x);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x1ffu));
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* >= 65520 */
    if (magnitude < 0x38800000u) { /* subnormal: let the adder of 0.5 round at 2^-24 */
        float rounded = fa_bits_float(magnitude) + 0.5f;
        return (uint16_t)(sign | (fa_float_bits(rounded) - 0x3f000000u));
    }
    uint32_t odd = (magnitude >> 13) & 1u;
    return (uint16_t)(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
}

/* OCP E4M3 ("fn"): bias 7, no infinities, NaN is S.1111.111. */
FA_SHARED_FUNCTION float fa_e4m3_to_float(uint8_t b)
{
    uint32_t sign = (uint32_t)(b & 0x80u) << 24;
    uint32_t magnitude = b & 0x7fu;
    if (magnitude == 0x7fu) return fa_bits_float(sign | 0x7fc00000u);
    return fa_bits_float(sign | fa_float_bits(fa_bits_float(magnitude << 20) * 0x1p120f));
}

/* Larger numbers become 448, the largest one. */
FA_SHARED_FUNCTION uint8_t fa_float_to_e4m3(float x)
{
    const uint32_t bits = fa_float_bits(x), magnitude = bits & 0x7fffffffu;
    const uint32_t sign = (bits >> 24) & 0x80u;
    if (magnitude > 0x7f800000u) return (uint8_t)(sign | 0x7fu);
    if (magnitude >= 0x43e00000u) return (uint8_t)(sign | 0x7eu);
    if (magnitude < 0x3c800000u) { /* subnormal: let the adder of 2^14 round at 2^-9 */
        const float rounded = fa_bits_float(magnitude) + 0x1p14f;
        return (uint8_t)(sign | (fa_float_bits(rounded) - 0x46800000u));
    }
    const uint32_t odd = (magnitude >> 20) & 1u;
    return (uint8_t)(sign | ((magnitude - 0x3c000000u + 0x7ffffu + odd) >> 20));
}

/* Larger numbers become 127 or -127; NaN becomes 0. */
FA_SHARED_FUNCTION int8_t fa_float_to_int8(float x)
{
    if (!(x > -127.0f)) return x <= -127.0f ? -127 : 0;
    if (x >= 127.0f) return 127;
    /* The adder of 1.5 * 2^23 rounds to an integer. */
    return (int8_t)(int32_t)(fa_float_bits(x + 0x1.8p23f) - 0x4b400000u);
}

#endif
