#include "scalar.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

typedef struct format {
    int exponent_bits, fraction_bits, ieee;
} format;

static format format_of(fa_dtype dtype)
{
    switch (dtype) {
    case FA_FLOAT16: return (format){5, 10, 1};
    case FA_BFLOAT16: return (format){8, 7, 1};
    case FA_FLOAT8_E4M3: return (format){4, 3, 0};
    case FA_FLOAT32:
    case FA_INT8:
    case FA_BOOL: break;
    }
    return (format){8, 23, 1};
}

/* 2^n, if that is a normal number; ldexp takes much longer. */
static double power_of_two(int n)
{
    const uint64_t bits = (uint64_t)(n + 1023) << 52;
    double power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

double ref_decode_small(uint32_t bits, int exponent_bits, int fraction_bits, int ieee)
{
    int bias = (1 << (exponent_bits - 1)) - 1;
    int top = (1 << exponent_bits) - 1;
    int fraction = (int)(bits & ((1u << fraction_bits) - 1));
    int exponent = (int)(bits >> fraction_bits) & top;
    double sign = bits >> (exponent_bits + fraction_bits) ? -1.0 : 1.0;

    if (ieee && exponent == top) return fraction ? NAN : sign * INFINITY;
    if (!ieee && exponent == top && fraction == (1 << fraction_bits) - 1) return NAN;
    if (exponent == 0) return sign * fraction * power_of_two(1 - bias - fraction_bits);
    return sign * (fraction + (1 << fraction_bits)) * power_of_two(exponent - bias - fraction_bits);
}

/* The bits of x in a format, rounded to nearest even. */
static uint32_t encode_small(double x, format f)
{
    int bias = (1 << (f.exponent_bits - 1)) - 1;
    uint32_t top = (1u << f.exponent_bits) - 1;
    uint32_t sign = (signbit(x) ? 1u : 0u) << (f.exponent_bits + f.fraction_bits);
    if (isnan(x)) return sign | ((top << f.fraction_bits) | ((1u << f.fraction_bits) - 1));

    double size = fabs(x);
    uint64_t size_bits;
    memcpy(&size_bits, &size, sizeof size_bits);
    int exponent = (int)(size_bits >> 52) - 1023; /* 2^exponent <= size, except for tiny sizes */
    if (exponent < 1 - bias) exponent = 1 - bias;
    uint32_t largest =
        f.ieee ? top << f.fraction_bits : (1u << (f.exponent_bits + f.fraction_bits)) - 2;
    if (isinf(x) || exponent > bias + 1) return sign | largest;

    /* In units of the last place; a carry out of the fraction increments the exponent
     * automatically. */
    uint32_t units = (uint32_t)nearbyint(size * power_of_two(f.fraction_bits - exponent));
    uint32_t biased = (uint32_t)(exponent + bias - 1);
    uint32_t bits = (biased << f.fraction_bits) + units;
    return sign | (bits < largest ? bits : largest);
}

static char *address(const fa_tensor *t, int64_t a, int64_t b, int64_t c, int64_t d)
{
    int64_t element = a * t->stride[0] + b * t->stride[1] + c * t->stride[2] + d * t->stride[3];
    return (char *)t->data + element * (int64_t)fa_dtype_size(t->dtype);
}

double ref_load(const fa_tensor *t, int64_t a, int64_t b, int64_t c, int64_t d)
{
    const char *p = address(t, a, b, c, d);
    float single;
    uint16_t half;
    uint8_t byte;
    switch (t->dtype) {
    case FA_FLOAT32: memcpy(&single, p, sizeof single); return (double)single;
    case FA_FLOAT16: memcpy(&half, p, sizeof half); return ref_decode_small(half, 5, 10, 1);
    case FA_BFLOAT16: memcpy(&half, p, sizeof half); return ref_decode_small(half, 8, 7, 1);
    case FA_FLOAT8_E4M3: memcpy(&byte, p, sizeof byte); return ref_decode_small(byte, 4, 3, 0);
    case FA_BOOL: memcpy(&byte, p, sizeof byte); return byte != 0;
    case FA_INT8: memcpy(&byte, p, sizeof byte); return (int8_t)byte;
    }
    return NAN;
}

void ref_store(const fa_tensor *t, int64_t a, int64_t b, int64_t c, int64_t d, double x)
{
    char *p = address(t, a, b, c, d);
    float single = (float)x;
    uint8_t truth = x != 0, byte;
    uint16_t half;
    switch (t->dtype) {
    case FA_FLOAT32: memcpy(p, &single, sizeof single); break;
    case FA_FLOAT16:
    case FA_BFLOAT16:
        half = (uint16_t)encode_small(x, format_of(t->dtype));
        memcpy(p, &half, sizeof half);
        break;
    case FA_FLOAT8_E4M3:
        byte = (uint8_t)encode_small(x, format_of(t->dtype));
        memcpy(p, &byte, sizeof byte);
        break;
    case FA_BOOL: memcpy(p, &truth, sizeof truth); break;
    case FA_INT8: *(int8_t *)p = (int8_t)nearbyint(fmin(fmax(x, -127), 127)); break;
    }
}

double ref_round(fa_dtype dtype, double x)
{
    uint32_t room = 0;
    const fa_tensor one = {.data = &room, .dtype = dtype, .shape = {1, 1, 1, 1}};
    ref_store(&one, 0, 0, 0, 0, x);
    return ref_load(&one, 0, 0, 0, 0);
}

double ref_epsilon(fa_dtype dtype) { return ldexp(1, -format_of(dtype).fraction_bits); }

double ref_smallest(fa_dtype dtype)
{
    format f = format_of(dtype);
    return ldexp(1, 2 - (1 << (f.exponent_bits - 1)) - f.fraction_bits);
}
