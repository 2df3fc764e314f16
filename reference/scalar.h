/*
 * Converts one element of a tensor to a double and back: the definitions of the formats.
 */
#ifndef REF_SCALAR_H
#define REF_SCALAR_H

#include <stdint.h>

#include "flashattn.h"

/* The value of a small float: sign, exponent bits, fraction bits; ieee: the top exponent is for
 * infinities and NaN (e4m3 has only a NaN, all ones). */
double ref_decode_small(uint32_t bits, int exponent_bits, int fraction_bits, int ieee);

/* Element (a, b, c, d) of a tensor. A FA_BOOL is 0 or 1. */
double ref_load(const fa_tensor *t, int64_t a, int64_t b, int64_t c, int64_t d);

/* Writes x, rounded to nearest even, to element (a, b, c, d). float8_e4m3 saturates at 448. */
void ref_store(const fa_tensor *t, int64_t a, int64_t b, int64_t c, int64_t d, double x);

/* x rounded to nearest even in a dtype. */
double ref_round(fa_dtype dtype, double x);

/* The distance from 1 to the next number: 2^-23 for float32. */
double ref_epsilon(fa_dtype dtype);

/* The smallest positive number of a dtype: absolute errors of this size are rounding. */
double ref_smallest(fa_dtype dtype);

#endif
