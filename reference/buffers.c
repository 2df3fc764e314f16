#include "buffers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The sanitizer has its own guard bands, which also detect reads. */
#if defined(__SANITIZE_ADDRESS__)
#define NO_GUARD 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define NO_GUARD 1
#endif
#endif
#ifdef NO_GUARD
enum { GUARD = 0 };
#else
enum { GUARD = 256 };
#endif
enum { POISON = 0xff, ALIGNED = 16 };

static void *allocate(size_t bytes)
{
    void *p = malloc(bytes ? bytes : 1);
    if (!p) {
        fprintf(stderr, "test: cannot allocate %zu bytes\n", bytes);
        abort();
    }
    return p;
}

void *ref_buffers_new(ref_buffers *buffers, const char *name, size_t bytes, size_t align)
{
    if (buffers->count == REF_MAX_BUFFERS) abort();
    ref_buffer *b = &buffers->list[buffers->count++];
    /* malloc aligns to 16; `align` more bytes make the address an odd multiple of align. */
    size_t shift = GUARD ? GUARD + align : 0;
    b->name = name;
    b->bytes = bytes;
    b->reserved = GUARD ? bytes + 2 * GUARD + align : bytes;
    b->base = allocate(bytes + 2 * GUARD + align);
    b->data = b->base + shift;
    b->copy = NULL;
    memset(&b->output, 0, sizeof b->output);
    b->whole_output = false;
    if (!GUARD) { /* the data end where the allocation ends */
        free(b->base);
        b->base = b->data = allocate(bytes);
    }
    memset(b->base, POISON, b->reserved);
    return b->data;
}

static void shuffle(ref_random *random, int *order, int n)
{
    for (int i = n - 1; i > 0; i--) {
        int j = (int)ref_random_between(random, 0, i), other = order[i];
        order[i] = order[j];
        order[j] = other;
    }
}

ref_layout ref_layout_random(ref_random *random, bool input, bool any_last)
{
    ref_layout l = REF_LAYOUT_CONTIGUOUS;
    int64_t kind = ref_random_between(random, 0, 3);
    if (kind == 1) l.order[1] = 2, l.order[2] = 1; /* (batch, head, sequence, dim) */
    if (kind >= 2) shuffle(random, l.order, any_last ? 4 : 3);
    if (kind == 3)
        for (int axis = 0; axis < 4; axis++) {
            if (axis == 3 && !any_last) continue;
            if (ref_random_once_in(random, 3)) l.gap[axis] = ref_random_between(random, 1, 40);
            if (input && ref_random_once_in(random, 5)) l.negative[axis] = true;
            if (input && ref_random_once_in(random, 8)) l.broadcast[axis] = true;
        }
    l.aligned_data = ref_random_once_in(random, 2);
    l.aligned_strides =
        l.aligned_data ? !ref_random_once_in(random, 3) : ref_random_once_in(random, 4);
    if (!l.aligned_data && ref_random_once_in(random, 2))
        l.misalignment = ref_random_between(random, 1, 17);
    return l;
}

void ref_buffers_tensor(ref_buffers *buffers, const char *name, fa_tensor *t,
                        const ref_layout *layout)
{
    int64_t size = (int64_t)fa_dtype_size(t->dtype), elements = 1, first = layout->misalignment;
    for (int n = 3; n >= 0; n--) {
        int axis = layout->order[n];
        if (layout->broadcast[axis]) {
            t->stride[axis] = 0;
            continue;
        }
        if (layout->aligned_strides && n < 3) elements = (elements + layout->gap[axis] + 7) / 8 * 8;
        else elements += layout->gap[axis];
        t->stride[axis] = elements;
        if (layout->negative[axis] && t->shape[axis] > 0) {
            first += t->stride[axis] * (t->shape[axis] - 1);
            t->stride[axis] = -t->stride[axis];
        }
        elements *= t->shape[axis];
    }
    size_t bytes = (size_t)((elements + layout->misalignment) * size);
    size_t align = layout->aligned_data ? ALIGNED : (size_t)size;
    t->data = (char *)ref_buffers_new(buffers, name, bytes, align) + first * size;
}

void ref_buffers_output(ref_buffers *buffers, const fa_tensor *t)
{
    for (int n = 0; n < buffers->count; n++) {
        ref_buffer *b = &buffers->list[n];
        const char *p = t->data;
        if (p >= b->data && p < b->data + b->bytes) b->output = *t;
    }
}

void ref_buffers_whole_output(ref_buffers *buffers, const void *data)
{
    for (int n = 0; n < buffers->count; n++)
        if (buffers->list[n].data == data) buffers->list[n].whole_output = true;
}

void ref_buffers_freeze(ref_buffers *buffers)
{
    for (int n = 0; n < buffers->count; n++) {
        ref_buffer *b = &buffers->list[n];
        if (b->output.data || b->whole_output) continue;
        free(b->copy);
        b->copy = allocate(b->bytes);
        memcpy(b->copy, b->data, b->bytes);
    }
}

static bool is_poison(const char *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)p[i] != POISON) return false;
    return true;
}

/* Whether the memory between the elements of an output's buffer is unchanged. */
static bool gaps_are_clean(const ref_buffer *b)
{
    const fa_tensor *t = &b->output;
    size_t size = fa_dtype_size(t->dtype);
    char *written = allocate(b->bytes);
    memset(written, 0, b->bytes);
    for (int64_t i = 0; i < t->shape[0]; i++)
        for (int64_t j = 0; j < t->shape[1]; j++)
            for (int64_t k = 0; k < t->shape[2]; k++)
                for (int64_t l = 0; l < t->shape[3]; l++) {
                    int64_t element =
                        i * t->stride[0] + j * t->stride[1] + k * t->stride[2] + l * t->stride[3];
                    const char *p = (const char *)t->data + element * (int64_t)size;
                    memset(written + (p - b->data), 1, size);
                }
    bool clean = true;
    for (size_t n = 0; n < b->bytes; n++)
        if (!written[n] && (unsigned char)b->data[n] != POISON) clean = false;
    free(written);
    return clean;
}

void ref_buffers_check(const ref_buffers *buffers, ref_report *report)
{
    for (int n = 0; n < buffers->count; n++) {
        const ref_buffer *b = &buffers->list[n];
        if (!is_poison(b->base, (size_t)(b->data - b->base)))
            ref_fail(report, "%s: memory before it was written", b->name);
        if (GUARD > 0 && !is_poison(b->data + b->bytes, GUARD))
            ref_fail(report, "%s: memory after it was written", b->name);
        if (b->output.data && !gaps_are_clean(b))
            ref_fail(report, "%s: memory between its elements was written", b->name);
        if (b->copy && memcmp(b->copy, b->data, b->bytes) != 0)
            ref_fail(report, "%s: an input was written", b->name);
    }
}

char *ref_buffers_copy(const ref_buffers *buffers)
{
    size_t bytes = 0;
    for (int i = 0; i < buffers->count; i++) bytes += buffers->list[i].reserved;
    char *copy = malloc(bytes + 1), *to = copy;
    if (!copy) abort();
    for (int i = 0; i < buffers->count; to += buffers->list[i++].reserved)
        memcpy(to, buffers->list[i].base, buffers->list[i].reserved);
    return copy;
}

void ref_buffers_put(const ref_buffers *buffers, const char *copy)
{
    for (int i = 0; i < buffers->count; copy += buffers->list[i++].reserved)
        memcpy(buffers->list[i].base, copy, buffers->list[i].reserved);
}

bool ref_buffers_are(const ref_buffers *buffers, const char *copy)
{
    for (int i = 0; i < buffers->count; copy += buffers->list[i++].reserved)
        if (memcmp(buffers->list[i].base, copy, buffers->list[i].reserved) != 0) return false;
    return true;
}

void ref_buffers_free(ref_buffers *buffers)
{
    for (int n = 0; n < buffers->count; n++) {
        free(buffers->list[n].base);
        free(buffers->list[n].copy);
    }
    buffers->count = 0;
}
