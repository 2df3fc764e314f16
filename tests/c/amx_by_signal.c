/*
 * AMX for processors without it: each of its instructions raises SIGILL, and the handler does what
 * Intel's manual specifies. So the machine code of the engine amx runs here, slowly. Tests that
 * link this file use it in place of src/cpu/amx.c.
 */
#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <float.h>
#include <math.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <unistd.h>

#include "check.h"
#include "cpu/amx.h"

bool fa_amx_is_there(void) { return true; }
bool fa_amx_request(void) { return true; }

typedef struct tile_shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes;

static _Thread_local tile_shapes shapes; /* palette 0: there are no tiles */
static _Thread_local uint32_t tiles[8][16][16];

/* Uses only functions that are safe in a signal handler. */
static void fail(const char *why)
{
    if (write(2, why, strlen(why)) < 0) _exit(2);
    abort();
}

/* ---- The instructions ------------------------------------------------------------------------ */

static void configure(const void *p)
{
    memcpy(&shapes, p, sizeof shapes);
    if (shapes.palette != 1 || shapes.start_row != 0) fail("ldtilecfg: no palette 1\n");
    for (int t = 0; t < 16; t++)
        if (shapes.rows[t] > (t < 8 ? 16 : 0) || shapes.row_bytes[t] > (t < 8 ? 64 : 0))
            fail("ldtilecfg: a tile is too large\n");
    memset(tiles, 0, sizeof tiles);
}

static void move(int t, char *p, int64_t stride, bool load)
{
    for (int r = 0; r < shapes.rows[t]; r++) {
        if (load) memcpy(tiles[t][r], p + r * stride, shapes.row_bytes[t]);
        else memcpy(p + r * stride, tiles[t][r], shapes.row_bytes[t]);
    }
}

static float flushed(float x) { return fabsf(x) < FLT_MIN ? copysignf(0.0f, x) : x; }

static float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return flushed(x);
}

/* The low and the high halves of words are summed separately; the sums are added to c at the
 * end. */
static void dot(int c, int a, int b)
{
    if (a == b || b == c || a == c) fail("tdpbf16ps: tiles must differ\n");
    const int words = shapes.row_bytes[a] / 4, columns = shapes.row_bytes[c] / 4;
    for (int r = 0; r < shapes.rows[c]; r++)
        for (int n = 0; n < columns; n++) {
            float low = 0, high = 0;
            for (int k = 0; k < words; k++) {
                const uint32_t x = tiles[a][r][k], y = tiles[b][k][n];
                low = flushed(fmaf(float_of(x << 16), float_of(y << 16), low));
                high = flushed(fmaf(float_of(x & 0xffff0000u), float_of(y & 0xffff0000u), high));
            }
            const float sum = flushed(float_of(tiles[c][r][n]) + flushed(low + high));
            memcpy(&tiles[c][r][n], &sum, sizeof sum);
        }
}

/* ---- The encoding: VEX.128.0F38.W0 in three bytes, opcode, ModRM, SIB, displacement
 * ----------- */

enum { NO_PREFIX = 0, PREFIX_F3 = 2, PREFIX_F2 = 3 };

typedef struct operands {
    int reg, rm, v;
    bool in_memory;
    char *address; /* without the index of a tile's rows, */
    int64_t index; /* which is their stride */
    int length;    /* of the instruction */
} operands;

static int64_t displacement(const uint8_t *p, int mod)
{
    int32_t wide;
    memcpy(&wide, p, sizeof wide);
    return mod == 1 ? (int8_t)*p : wide;
}

static operands decode(const uint8_t *p, const greg_t *g)
{
    static const int name[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                                 REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                                 REG_R12, REG_R13, REG_R14, REG_R15};
    const int high_index = p[1] & 0x40 ? 0 : 8, high_base = p[1] & 0x20 ? 0 : 8;
    const int mod = p[4] >> 6;
    operands o = {.reg = p[4] >> 3 & 7, .rm = p[4] & 7, .v = ~(p[2] >> 3) & 15, .length = 5};
    o.in_memory = mod != 3;
    if (!o.in_memory) return o;
    int base = o.rm;
    if (base == 4) {
        const int sib = p[o.length++], index = (sib >> 3 & 7) | high_index;
        base = sib & 7;
        if (index != 4) o.index = (int64_t)((uint64_t)g[name[index]] << (sib >> 6));
    }
    const bool absolute = mod == 0 && base == 5, relative = absolute && o.rm == 5;
    const int bytes = mod == 1 ? 1 : mod == 2 || absolute ? 4 : 0;
    int64_t address = absolute ? 0 : g[name[base | high_base]];
    if (bytes) address += displacement(p + o.length, mod);
    o.length += bytes;
    if (relative) address += (int64_t)(intptr_t)p + o.length;
    o.address = (char *)(intptr_t)address; // NOLINT(performance-no-int-to-ptr)
    return o;
}

static void on_illegal_instruction(int number, siginfo_t *info, void *context)
{
    (void)number;
    (void)info;
    greg_t *g = ((ucontext_t *)context)->uc_mcontext.gregs;
    const uint8_t *p = (const uint8_t *)(intptr_t)g[REG_RIP]; // NOLINT(performance-no-int-to-ptr)
    if (p[0] != 0xc4 || (p[1] & 31) != 2 || p[2] & 0x84) fail("SIGILL: not by AMX\n");
    const int opcode = p[3], prefix = p[2] & 3;
    operands o = decode(p, g);
    if (opcode == 0x49 && prefix == NO_PREFIX && o.in_memory) configure(o.address + o.index);
    else if (opcode == 0x49 && prefix == NO_PREFIX) memset(&shapes, 0, sizeof shapes);
    else if (shapes.palette != 1) fail("a tile instruction, and no tiles\n");
    else if (opcode == 0x49 && prefix == PREFIX_F2) memset(tiles[o.reg], 0, sizeof tiles[0]);
    else if (opcode == 0x4b && prefix == PREFIX_F2) move(o.reg, o.address, o.index, true);
    else if (opcode == 0x4b && prefix == PREFIX_F3) move(o.reg, o.address, o.index, false);
    else if (opcode == 0x5c && prefix == PREFIX_F3 && o.v < 8) dot(o.reg, o.rm, o.v);
    else fail("SIGILL: an instruction of AMX that is not imitated\n");
    g[REG_RIP] += o.length;
}

/* If the processor has AMX, the tests of the engine itself run. */
__attribute__((constructor)) static void install(void)
{
    unsigned a, b, c, d;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) && d >> 24 & 1) {
        puts("skipped: this processor has AMX");
        exit(TEST_SKIPPED);
    }
    const struct sigaction action = {.sa_sigaction = on_illegal_instruction,
                                     .sa_flags = SA_SIGINFO | SA_NODEFER};
    if (sigaction(SIGILL, &action, NULL) != 0) abort();
}
#endif
