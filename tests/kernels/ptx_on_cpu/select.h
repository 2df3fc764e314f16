/*
 * kernels/ptx/select.cuh in C.
 */
#ifndef TEST_PTX_ON_CPU_SELECT_H
#define TEST_PTX_ON_CPU_SELECT_H

FA_DEVICE float ptx_choose(uint32_t word, uint32_t bits, float x, float y)
{
    return word & bits ? x : y;
}
FA_DEVICE uint32_t ptx_min_u16x2(uint32_t a, uint32_t b)
{
    const uint32_t low = a & 0xffffu, other = b & 0xffffu;
    const uint32_t high = a >> 16 < b >> 16 ? a >> 16 : b >> 16;
    return (low < other ? low : other) | high << 16;
}

#endif
