/*
 * Float32 numbers as sums of two float16 numbers: x * scale = high + low. high is x * scale,
 * rounded; low is the remainder, rounded. Together they have the 24 bits of float32, or one less.
 *
 * float16 has few exponents. So numbers are multiplied by a power of two that brings the largest of
 * them between 2^14 and 2^15. A number that is more than 2^17 times smaller than the largest loses
 * bits of its low part: its error is at most 2^-40 of the largest.
 *
 * In shared memory, 32 floats or 64 halves are 128 bytes, the span of the swizzle. So two blocks of
 * 32 columns become, in place, a block of 64 high parts and one of 64 low parts. A warp processes
 * four rows of such a pair at a time: lane l reads 8 floats of block l / 8 % 2. Lanes that access
 * shared memory in the same cycles have two rows that differ in bits 0 and 2, so neither reads nor
 * writes have bank conflicts.
 */
#ifndef FA_KERNELS_FORWARD_F16X3_SM90_PARTS_CUH
#define FA_KERNELS_FORWARD_F16X3_SM90_PARTS_CUH

#include "forward_f16x3_sm90/config.cuh"
#include "common/device.cuh"
#include "ptx/convert.cuh"
#include "ptx/shared.cuh"

/* 8 rows of a pair of blocks take two steps of 4 rows. The lane's row in step 1 is its row in step
 * 0, ^ ROW_OF_STEP_1; the address of this row is ^ STEP_1. */
enum { ROW_OF_STEP_1 = 2, STEP_1 = ROW_OF_STEP_1 * (128 + 16) };

FA_DEVICE int split_row(void)
{
    const int lane = (int)threadIdx.x % 32;
    return lane / 16 ^ (lane & 4 ? 5 : 0);
}

/* The addresses, in 8 rows of a pair of blocks, where the lane reads the first 4 of its floats (the
 * others are at ^ 16), and where it writes 8 high parts. The function takes the size of a block in
 * bytes. */
FA_DEVICE uint32_t split_source(int block)
{
    const int lane = (int)threadIdx.x % 32, row = split_row();
    return (uint32_t)(lane / 8 % 2 * block + row * 128 + (lane % 4 * 2 ^ row) * 16);
}

FA_DEVICE uint32_t split_target(void)
{
    const int lane = (int)threadIdx.x % 32, row = split_row();
    return (uint32_t)(row * 128 + ((lane / 8 % 2 * 4 + lane % 4) ^ row) * 16);
}

/* The power of two by which numbers are multiplied if the largest of them has these bits; and its
 * inverse. Powers are limited to 2^111, because the inverse of a larger one, divided by 2^HEADROOM,
 * would not be a normal number. */
enum { LARGEST_POWER = 127 + 111 };

FA_DEVICE float scale_of(uint32_t largest)
{
    return __uint_as_float(min(127u + 127 + 14 - (largest >> 23), (uint32_t)LARGEST_POWER) << 23);
}

FA_DEVICE float unit_of(float scale)
{
    return __uint_as_float((254u << 23) - __float_as_uint(scale));
}

typedef struct eight {
    float x[8];
} eight;

FA_DEVICE eight load_eight(uint32_t from)
{
    const uint4 a = ptx_ld_shared_v4(from), b = ptx_ld_shared_v4(from ^ 16);
    const eight x = {{__uint_as_float(a.x), __uint_as_float(a.y), __uint_as_float(a.z),
                      __uint_as_float(a.w), __uint_as_float(b.x), __uint_as_float(b.y),
                      __uint_as_float(b.z), __uint_as_float(b.w)}};
    return x;
}

/* Splits two numbers into two high and two low parts; with high parts alone the latter are 0. */
FA_DEVICE uint32_t split_two(float x, float y, uint32_t *low)
{
    const uint32_t high = ptx_pack_f16x2(x, y);
    *low = 0;
    if (HIGH_ALONE) return high;
    *low = ptx_pack_f16x2(x - ptx_half_to_float((uint16_t)high),
                          y - ptx_half_to_float((uint16_t)(high >> 16)));
    return high;
}

/* block: bytes from a high part to its low part. */
FA_DEVICE void store_parts(uint32_t to, int block, const eight *x, float scale)
{
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        high[i] = split_two(x->x[2 * i] * scale, x->x[2 * i + 1] * scale, &low[i]);
    ptx_st_shared_v4(to, make_uint4(high[0], high[1], high[2], high[3]));
    if (HIGH_ALONE) return;
    ptx_st_shared_v4(to + block, make_uint4(low[0], low[1], low[2], low[3]));
}

/* The largest absolute value, ignoring NaN. */
FA_DEVICE float largest_of(const eight *x, float largest)
{
#pragma unroll
    for (int i = 0; i < 8; i++) largest = fmaxf(largest, fabsf(x->x[i]));
    return largest;
}

/* The same for finite numbers only. */
FA_DEVICE float largest_finite(const eight *x, float largest)
{
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (fabsf(x->x[i]) < INFINITY) largest = fmaxf(largest, fabsf(x->x[i]));
    return largest;
}

/* The largest number of the row's eight lanes. largest: the lane's own. */
FA_DEVICE float largest_of_row(float largest)
{
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 2));
    return fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 8));
}

#endif
