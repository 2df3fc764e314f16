/*
 * Numbers and tensors from a fuzzer's input, for the targets that call the API.
 */
#ifndef FUZZ_INPUT_H
#define FUZZ_INPUT_H

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "flashattn.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

enum {
    BUFFER = 1 << 16, /* bytes of a tensor's memory */
    SHIFT = 8,
    NEWER = 64 /* bytes behind a struct: the fields of a later version */
};

typedef struct input {
    const uint8_t *bytes;
    size_t left;
} input;

static inline uint8_t take(input *in)
{
    if (in->left == 0) return 0;
    in->left--;
    return *in->bytes++;
}

/* Mostly small; now and then any 64 bits. */
static inline int64_t take_integer(input *in)
{
    uint8_t first = take(in);
    if (first < 250) return (int64_t)first % 20 - (first >= 240 ? 10 : 0);
    uint64_t wide = 0;
    for (int n = 0; n < 8; n++) wide = wide << 8 | take(in);
    return (int64_t)wide;
}

static inline float take_float(input *in)
{
    uint8_t first = take(in);
    if (first < 200) return (float)first / 64 - 1;
    uint32_t bits = 0;
    for (int n = 0; n < 4; n++) bits = bits << 8 | take(in);
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Whether all elements lie in a buffer of BUFFER bytes, shifted by up to SHIFT. */
static inline bool fits(const fa_tensor *t)
{
    int64_t low = 0, high = 1;
    for (int axis = 0; axis < 4; axis++) {
        int64_t step;
        if (t->shape[axis] <= 0) return true; /* nothing to read; below 0 the call refuses it */
        if (__builtin_mul_overflow(t->shape[axis] - 1, t->stride[axis], &step)) return false;
        if (__builtin_add_overflow(step < 0 ? low : high, step, step < 0 ? &low : &high))
            return false;
    }
    int64_t size = (int64_t)fa_dtype_size(t->dtype),
            half = (BUFFER / 2 - SHIFT) / (size ? size : 1);
    return low >= -half && high <= half;
}

/* A tensor of its own buffer, data in the middle. base: the shape it usually has. */
static inline fa_tensor take_tensor(input *in, char *buffer, const int64_t base[4], fa_dtype dtype)
{
    fa_tensor t = {buffer + BUFFER / 2, dtype, {base[0], base[1], base[2], base[3]}, {0, 0, 0, 1}};
    for (int axis = 2; axis >= 0; axis--)
        if (__builtin_mul_overflow(t.stride[axis + 1], t.shape[axis + 1], &t.stride[axis]))
            t.stride[axis] = 1;
    uint8_t changes = take(in);
    if ((changes & 7) == 7) t.dtype = (fa_dtype)(take(in) % 7);
    if (changes & 8) t.shape[take(in) % 4] = take_integer(in);
    if (changes & 16) t.stride[take(in) % 4] = take_integer(in);
    if (changes & 32) t.data = (char *)t.data + take(in) % SHIFT;
    if ((changes & 192) == 192 || !fits(&t)) t.data = NULL;
    return t;
}

static inline void must_say_why(fa_status status)
{
    if (status == FA_OK) return;
    if (!fa_last_error()[0] || strcmp(fa_status_name(status), "unknown status") == 0) abort();
}

/* A size that a caller of this or another version may give: no field is cut in two. */
static inline size_t take_size(input *in, size_t known)
{
    return take(in) % 8 ? known : take(in) % ((known + NEWER) / 8 + 1) * 8;
}

#endif
