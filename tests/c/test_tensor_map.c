/*
 * Which tensors TMA can describe: every limit from both sides. Needs no driver.
 */
#include <stdint.h>
#include <string.h>

#include "check.h"
#include "cuda/driver.h"

static _Alignas(16) char memory[64];

/* (dim, sequence, head, batch) of a (batch, sequence, head, dim) tensor: heads are nearer to each
 * other than rows. */
static fa_tensor_map_shape usual(void)
{
    return (fa_tensor_map_shape){.base = memory,
                                 .element = FA_ELEMENT_BFLOAT16,
                                 .axes = 4,
                                 .extent = {128, 1000, 8, 3},
                                 .stride = {2, 2048, 256, 2048000},
                                 .box = {64, 256, 1, 1}};
}

static void fits(int line, fa_tensor_map_shape shape)
{
    const char *why = "unchanged";
    const bool fine = fa_tensor_map_fits(&shape, &why);
    test_check(fine && !why, __FILE__, line, "it does not fit: %s", why ? why : "(no reason)");
}
#define FITS(shape) fits(__LINE__, shape)

static void refused(int line, fa_tensor_map_shape shape, const char *reason)
{
    const char *why = NULL;
    const bool fine = fa_tensor_map_fits(&shape, &why);
    test_check(!fine && why && strstr(why, reason), __FILE__, line, "fits %d, %s; expected: %s",
               fine, why ? why : "(no reason)", reason);
    test_check(!fa_tensor_map_fits(&shape, NULL), __FILE__, line, "it fits if nobody asks why");
}
#define REFUSED(shape, reason) refused(__LINE__, shape, reason)

static void test_axes(void)
{
    fa_tensor_map_shape shape = usual();
    FITS(shape);
    shape.axes = 1;
    FITS(shape);
    shape.axes = 0;
    REFUSED(shape, "1 to 5 axes");
    shape.axes = 6;
    REFUSED(shape, "1 to 5 axes");
    shape.axes = 5; /* its last one is all zeros */
    REFUSED(shape, "an extent is 0");
    shape.extent[4] = shape.box[4] = 1;
    FITS(shape);
}

static void test_base(void)
{
    for (int bytes = 0; bytes < 32; bytes += 2) {
        fa_tensor_map_shape shape = usual();
        shape.base = memory + bytes;
        if (bytes % 16 == 0) FITS(shape);
        else REFUSED(shape, "address is not a multiple of 16 bytes");
    }
}

static void test_extents(void)
{
    for (int axis = 0; axis < 4; axis++) {
        fa_tensor_map_shape shape = usual();
        shape.extent[axis] = 1;
        FITS(shape);
        shape.extent[axis] = (uint64_t)1 << 31;
        FITS(shape);
        shape.extent[axis]++;
        REFUSED(shape, "an extent is above 2^31");
        shape.extent[axis] = ((uint64_t)1 << 32) + 1;
        REFUSED(shape, "an extent is above 2^31");
        shape.extent[axis] = 0;
        REFUSED(shape, "an extent is 0");
    }
}

static void test_strides(void)
{
    static const struct {
        int64_t stride;
        const char *reason; /* NULL: it fits */
    } cases[] = {{16, NULL},
                 {(int64_t)1 << 39, NULL},
                 {((int64_t)1 << 40) - 16, NULL},
                 {(int64_t)1 << 40, "2^40 bytes or more"},
                 {INT64_MAX, "2^40 bytes or more"},
                 {8, "not a multiple of 16 bytes"},
                 {2046, "not a multiple of 16 bytes"},
                 {0, "broadcast"},
                 {-16, "negative"},
                 {-2048, "negative"}};
    for (int axis = 1; axis < 4; axis++)
        for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
            fa_tensor_map_shape shape = usual();
            shape.stride[axis] = (uint64_t)cases[i].stride;
            if (cases[i].reason) REFUSED(shape, cases[i].reason);
            else FITS(shape);
            shape.extent[axis] = 1; /* now this axis is never stepped along */
            FITS(shape);
        }
}

static void test_boxes(void)
{
    for (uint32_t rows = 0; rows <= 260; rows++) {
        fa_tensor_map_shape shape = usual();
        shape.box[1] = rows;
        if (rows >= 1 && rows <= 256) FITS(shape);
        else REFUSED(shape, "1 to 256 indices");
    }
    for (uint32_t columns = 1; columns <= 256; columns++) {
        fa_tensor_map_shape shape = usual();
        shape.box[0] = columns;
        if (columns % 8 == 0 && columns <= 64) FITS(shape);
        else REFUSED(shape, "rows are not 16, 32, ... or 128 bytes");
    }
    fa_tensor_map_shape shape = usual();
    shape.element = FA_ELEMENT_TF32;
    REFUSED(shape, "rows are not 16, 32, ... or 128 bytes");
    shape.box[0] = 32;
    FITS(shape);
    shape.element = FA_ELEMENT_FLOAT8_E4M3;
    shape.box[0] = 128;
    FITS(shape);
    shape.box[0] = 0;
    REFUSED(shape, "1 to 256 indices");
}

int main(void)
{
    test_axes();
    test_base();
    test_extents();
    test_strides();
    test_boxes();
    return test_end();
}
