/* The first lane that continues after an exchange computes what is the same for its whole warp. */
#include "ampere_units.h"

#include <math.h>
#include <string.h>

#include "../../src/convert.h"
#include "cuda_on_cpu.h"
#include "wide_vectors.h"

/* The exchange from which something was computed. */
typedef struct exchange {
    const void *shown;
    unsigned phase;
} exchange;

static bool is_new(exchange *last, const void *shown)
{
    const unsigned phase = cuda_warp_phase();
    if (last->shown == shown && last->phase == phase) return false;
    last->shown = shown;
    last->phase = phase;
    return true;
}

/* ---- mma.sync -------------------------------------------------------------------------------- */

typedef struct operands {
    uint32_t a[4], b[2];
} operands;

static float convert(uint32_t x2, int half, bool bfloat16)
{
    const uint16_t bits = (uint16_t)(half ? x2 >> 16 : x2 & 0xffffu);
    return bfloat16 ? fa_bfloat_to_float(bits) : fa_half_to_float(bits);
}

/* Sums over k, from 0 on. */
WITH_WIDE_VECTORS
static void multiply(float product[restrict 16][8], float x[restrict 16][16],
                     float y[restrict 16][8])
{
    memset(product, 0, sizeof(float[16][8]));
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < 8; j++) product[i][j] += x[i][k] * y[k][j];
}

WITH_WIDE_VECTORS
static void multiply_doubles(double product[restrict 16][8], double x[restrict 16][8],
                             double y[restrict 8][8])
{
    memset(product, 0, sizeof(double[16][8]));
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 8; k++)
            for (int j = 0; j < 8; j++) product[i][j] += x[i][k] * y[k][j];
}

/* The whole matrices, from all lanes' registers. */
static void gather(float a[16][16], float b[16][8], const char *shown, bool bfloat16)
{
    for (int lane = 0; lane < 32; lane++) {
        const int g = lane / 4, t = lane % 4;
        operands x;
        memcpy(&x, shown + (size_t)lane * cuda_shown_pitch(), sizeof x);
        for (int i = 0; i < 8; i++)
            a[g + i / 2 % 2 * 8][2 * t + i / 4 * 8 + i % 2] = convert(x.a[i / 2], i % 2, bfloat16);
        for (int i = 0; i < 4; i++)
            b[2 * t + i / 2 * 8 + i % 2][g] = convert(x.b[i / 2], i % 2, bfloat16);
    }
}

void ampere_mma(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1, bool bfloat16)
{
    static exchange last;
    static float product[16][8];
    const operands mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
    const char *shown = cuda_show_warp(&mine, sizeof mine);
    if (is_new(&last, shown)) {
        float x[16][16], y[16][8];
        gather(x, y, shown, bfloat16);
        multiply(product, x, y);
    }
    for (int e = 0; e < 4; e++) c[e] += product[g + e / 2 * 8][2 * t + e % 2];
}

/* Rounded to float32, towards 0. */
static float cut_off(double x)
{
    float nearest = (float)x;
    uint32_t bits;
    memcpy(&bits, &nearest, sizeof bits);
    bits -= fabs((double)nearest) > fabs(x); /* the next number towards 0 */
    memcpy(&nearest, &bits, sizeof bits);
    return nearest;
}

static double tf32(uint32_t bits)
{
    float x;
    bits &= 0xffffe000u;
    memcpy(&x, &bits, sizeof x);
    return x;
}

void ampere_mma_tf32(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    static exchange last;
    static double product[16][8];
    const operands mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
    const char *shown = cuda_show_warp(&mine, sizeof mine);
    if (is_new(&last, shown)) {
        double x[16][8], y[8][8];
        for (int lane = 0; lane < 32; lane++) {
            operands of;
            memcpy(&of, shown + (size_t)lane * cuda_shown_pitch(), sizeof of);
            for (int i = 0; i < 4; i++)
                x[lane / 4 + i % 2 * 8][lane % 4 + i / 2 * 4] = tf32(of.a[i]);
            for (int i = 0; i < 2; i++) y[lane % 4 + i * 4][lane / 4] = tf32(of.b[i]);
        }
        multiply_doubles(product, x, y);
    }
    for (int e = 0; e < 4; e++)
        c[e] = cut_off((double)c[e] + product[g + e / 2 * 8][2 * t + e % 2]);
}

/* ---- ldmatrix -------------------------------------------------------------------------------- */

void ampere_ldmatrix(uint32_t x[4], uint32_t address, bool transposed)
{
    static exchange last;
    static uint16_t matrices[4][8][8];
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
    const char *shown = cuda_show_warp(&address, sizeof address);
    if (is_new(&last, shown))
        for (int row = 0; row < 32; row++) {
            uint32_t from;
            memcpy(&from, shown + (size_t)row * cuda_shown_pitch(), sizeof from);
            memcpy(matrices[row / 8][row % 8], cuda_shared_at(from, 16), 16);
        }
    for (int i = 0; i < 4; i++) {
        const uint16_t low = transposed ? matrices[i][2 * t][g] : matrices[i][g][2 * t];
        const uint16_t high = transposed ? matrices[i][2 * t + 1][g] : matrices[i][g][2 * t + 1];
        x[i] = low | (uint32_t)high << 16;
    }
}
