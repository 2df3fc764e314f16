#include "location.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "error.h"

/* Device memory must not reach the CPU's engine. */
static fa_status check_host_pointer(const char *name, const void *pointer,
                                    const fa_backend *backend)
{
    const int ordinal = backend->out_of_reach(pointer);
    if (ordinal == FA_HOST_MEMORY) return FA_OK;
    return fa_fail(FA_ERROR_ARGUMENT,
                   "%s at %p is on CUDA device %d: expected host memory, for the call runs on the "
                   "CPU (where q or fa_combine's out is, or as options.device says)",
                   name, pointer, ordinal);
}

fa_status fa_check_location(const char *name, const void *pointer, fa_location expected)
{
    if (!pointer) return FA_OK;
    if (expected.ordinal == FA_HOST_MEMORY)
        return check_host_pointer(name, pointer, expected.backend);
    const int ordinal = expected.backend->device_of(pointer);
    if (ordinal == expected.ordinal) return FA_OK;
    if (ordinal == FA_HOST_MEMORY)
        return fa_fail(FA_ERROR_ARGUMENT,
                       "%s at %p lies in host memory: expected memory of CUDA device %d, on which "
                       "the call runs; copy it there first",
                       name, pointer, expected.ordinal);
    return fa_fail(FA_ERROR_ARGUMENT,
                   "%s at %p is on CUDA device %d: expected device %d, that of the current "
                   "context",
                   name, pointer, ordinal, expected.ordinal);
}

fa_status fa_check_host_array(const char *name, const void *array, const fa_backend *backend)
{
    const int ordinal = array ? backend->out_of_reach(array) : FA_HOST_MEMORY;
    if (ordinal == FA_HOST_MEMORY) return FA_OK;
    return fa_fail(FA_ERROR_ARGUMENT,
                   "%s at %p is on CUDA device %d: expected an array in host memory, whose "
                   "entries lead to the data",
                   name, array, ordinal);
}

/* Memory of a tensor without elements is never touched, wherever it lies. */
static fa_status check_tensor(const char *name, const fa_tensor *t, fa_location expected)
{
    if (!t || !t->shape[0] || !t->shape[1] || !t->shape[2] || !t->shape[3]) return FA_OK;
    return fa_check_location(name, t->data, expected);
}

static fa_status check_options(const fa_options *o, fa_location expected)
{
    static const struct {
        const char *name;
        size_t field;
    } arrays[] = {
#define ARRAY(field) {"options." #field, offsetof(fa_options, field)}
        ARRAY(alibi_slopes), ARRAY(sinks),     ARRAY(dropout_state), ARRAY(cu_seqlens_q),
        ARRAY(cu_seqlens_k), ARRAY(seqlens_q), ARRAY(seqlens_k),     ARRAY(block_table),
        ARRAY(q_descale),    ARRAY(k_descale), ARRAY(v_descale),
#undef ARRAY
    };
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) {
        const void *pointer;
        memcpy(&pointer, (const char *)o + arrays[i].field, sizeof pointer);
        if (pointer) FA_TRY(fa_check_location(arrays[i].name, pointer, expected));
    }
    FA_TRY(check_tensor("options.bias", o->bias, expected));
    FA_TRY(check_tensor("options.k_scale", o->k_scale, expected));
    FA_TRY(check_tensor("options.v_scale", o->v_scale, expected));
    return check_tensor("options.mask", o->mask, expected);
}

static fa_status check_gradients(const fa_gradients *g, fa_location expected)
{
    if (!g) return FA_OK;
    FA_TRY(check_tensor("gradients.dout.data", &g->dout, expected));
    FA_TRY(check_tensor("gradients.dq.data", &g->dq, expected));
    FA_TRY(check_tensor("gradients.dk.data", &g->dk, expected));
    FA_TRY(check_tensor("gradients.dv.data", &g->dv, expected));
    FA_TRY(check_tensor("gradients.dbias.data", &g->dbias, expected));
    FA_TRY(fa_check_location("gradients.dlse", g->dlse, expected));
    return fa_check_location("gradients.dsinks", g->dsinks, expected);
}

/* The driver takes 60 ns to find where a pointer leads. This call has asked it about q, so it does not ask about
 * arrays that start in the same allocation. */
static fa_status check_beside_q(const fa_arguments *a, const char *name, const fa_tensor *t,
                                fa_location expected)
{
    const fa_allocation *m = &a->q_memory;
    const bool known = t && expected.ordinal != FA_HOST_MEMORY && m->ordinal == expected.ordinal;
    if (known && (t == a->q || (uintptr_t)t->data - m->first < m->bytes)) return FA_OK;
    return check_tensor(name, t, expected);
}

fa_status fa_check_locations(const fa_arguments *a, fa_location expected)
{
    if (a->located && a->location == expected.ordinal) return FA_OK;
    FA_TRY(check_beside_q(a, "q.data", a->q, expected));
    FA_TRY(check_beside_q(a, "k.data", a->k, expected));
    FA_TRY(check_beside_q(a, "v.data", a->v, expected));
    FA_TRY(check_beside_q(a, "out.data", a->out, expected));
    FA_TRY(check_tensor("weights.data", a->weights, expected));
    FA_TRY(fa_check_location("rows", a->rows, expected));
    FA_TRY(check_gradients(a->gradients, expected));
    const bool rows = a->q && a->q->shape[0] && a->q->shape[1] && a->q->shape[2];
    if (rows) FA_TRY(fa_check_location("lse", a->lse, expected));
    return check_options(a->options, expected);
}

static fa_status check_part_as(const char *name, const char *lse_name, const fa_combine_problem *c,
                               int64_t i, fa_location expected)
{
    FA_TRY(check_tensor(name, &c->parts[i], expected));
    return fa_check_location(lse_name, c->part_lse[i], expected);
}

/* Names are made only for a part that is wrong. */
static fa_status check_part(const fa_combine_problem *c, int64_t i, fa_location expected)
{
    char name[48], lse_name[48];
    if (check_part_as("parts", "part_lse", c, i, expected) == FA_OK) return FA_OK;
    (void)snprintf(name, sizeof name, "parts[%" PRId64 "].data", i);
    (void)snprintf(lse_name, sizeof lse_name, "part_lse[%" PRId64 "]", i);
    return check_part_as(name, lse_name, c, i, expected);
}

fa_status fa_check_combine_locations(const fa_combine_problem *c, fa_location expected)
{
    if (!c->batch || !c->n_q || !c->heads) return FA_OK;
    if (c->d_v) FA_TRY(fa_check_location("out.data", c->out.data, expected));
    FA_TRY(fa_check_location("lse", c->lse, expected));
    for (int64_t i = 0; i < c->num_parts; i++) FA_TRY(check_part(c, i, expected));
    return FA_OK;
}

fa_status fa_check_append_locations(const fa_append_call *c, fa_location expected)
{
    static const struct {
        const char *name;
        size_t field;
    } arrays[] = {
#define ARRAY(field) {"options." #field, offsetof(fa_append_options, field)}
        ARRAY(lengths),          ARRAY(left_padding),      ARRAY(cache_index),
        ARRAY(seqlens_new),      ARRAY(cu_seqlens_new),    ARRAY(seqlens_q),
        ARRAY(block_table),      ARRAY(cu_seqlens_q),      ARRAY(rotary_positions),
        ARRAY(lengths_after),    ARRAY(block_table_after), ARRAY(row_table_after),
        ARRAY(cu_seqlens_after),
#undef ARRAY
    };
    const fa_append_options *o = c->options;
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) {
        const void *pointer;
        memcpy(&pointer, (const char *)o + arrays[i].field, sizeof pointer);
        if (pointer) FA_TRY(fa_check_location(arrays[i].name, pointer, expected));
    }
    FA_TRY(check_tensor("k_new.data", c->k_new, expected));
    FA_TRY(check_tensor("v_new.data", c->v_new, expected));
    FA_TRY(check_tensor("k_cache.data", c->k_cache, expected));
    FA_TRY(check_tensor("v_cache.data", c->v_cache, expected));
    FA_TRY(check_tensor("options.cos.data", o->cos, expected));
    FA_TRY(check_tensor("options.sin.data", o->sin, expected));
    FA_TRY(check_tensor("options.q.data", o->q, expected));
    FA_TRY(check_tensor("options.q_out.data", o->q_out, expected));
    FA_TRY(check_tensor("options.k_scale.data", o->k_scale, expected));
    return check_tensor("options.v_scale.data", o->v_scale, expected);
}
