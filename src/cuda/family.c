/* Functions that the planners of all families share. */
#include "cuda/family.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

#include "../../kernels/common/packed.h"

void fa_cuda_say(char *why, size_t size, const char *format, ...)
{
    va_list arguments;
    if (!why) return;
    va_start(arguments, format);
    vsnprintf(why, size, format, arguments);
    va_end(arguments);
}

static bool refuse_architecture(const fa_variant *v, const fa_cuda_device *device, char *why,
                                size_t size)
{
    const bool hopper_alone = v->architecture == 90;
    const int architecture = fa_cuda_architecture(device);
    if (architecture == v->architecture || (architecture > v->architecture && !hopper_alone))
        return false;
    fa_cuda_say(why, size, "CUDA device %" PRId32 " (%s) has architecture %d.%d: expected %d.%d%s",
                device->ordinal, device->name, (int)device->major, (int)device->minor,
                v->architecture / 10, v->architecture % 10, hopper_alone ? "" : " or later");
    return true;
}

int fa_cuda_static_smem(const fa_variant *variant)
{
    return variant->static_smem > 0 ? variant->static_smem : FA_CUDA_STATIC_SMEM;
}

static bool refuse_smem(const fa_variant *v, int smem_bytes, const fa_cuda_device *device,
                        char *why, size_t size)
{
    const int needed = smem_bytes + fa_cuda_static_smem(v);
    if (needed <= device->smem_per_block) return false;
    fa_cuda_say(why, size,
                "CUDA device %" PRId32
                " (%s) has %d bytes of shared memory for a block: expected %d for %s",
                device->ordinal, device->name, (int)device->smem_per_block, needed, v->name);
    return true;
}

bool fa_cuda_is_tried(const fa_cuda_family *family, const fa_cuda_device *device)
{
    const int architecture = fa_cuda_architecture(device);
    return architecture >= family->oldest && architecture <= family->newest &&
           architecture != family->except;
}

void fa_cuda_plan_begin(const fa_cuda_device *device, const fa_cuda_family *family,
                        fa_cuda_plan *plan)
{
    plan->family = family;
    plan->arithmetic = "";
    plan->device = device->ordinal;
    plan->workspace_bytes = 0;
    plan->count = 0;
}

fa_cuda_plan_launch *fa_cuda_plan_add(const fa_variant *v, int threads, int smem_bytes,
                                      fa_cuda_queue_function *queue, const fa_cuda_device *device,
                                      fa_cuda_plan *plan, char *why, size_t size)
{
    if (refuse_architecture(v, device, why, size) || refuse_smem(v, smem_bytes, device, why, size))
        return NULL;
    fa_cuda_plan_launch *l = &plan->launches[plan->count++];
    l->variant = (int)(v - fa_variants);
    l->grid = 0;
    l->threads = (uint32_t)threads;
    l->smem_bytes = (uint32_t)smem_bytes;
    l->cluster = 1;
    l->tile_q = l->tile_k = 0;
    l->fewest_queries = l->tiles = l->tasks = 0;
    l->overlaps = false;
    l->idle = true;
    l->workspace_offset = l->workspace_bytes = 0;
    l->queue = queue;
    l->dbias = FA_CUDA_DBIAS_ALONE;
    l->dbias_sums_offset = 0;
    return l;
}

const fa_variant *fa_cuda_narrowest(const fa_problem *p, int first, int last)
{
    const int64_t dim = p->d > p->d_v ? p->d : p->d_v;
    const fa_variant *v = &fa_variants[first];
    while (v->head_dim < dim && v < &fa_variants[last]) v++;
    return v;
}

bool fa_cuda_refuse_other_than_float32(const fa_problem *p, char *why, size_t size)
{
    const fa_view *views[] = {&p->q, &p->k, &p->v, &p->out};
    static const char *const names[] = {"q", "k", "v", "out"};
    for (int i = 0; i < 4; i++) {
        if (views[i]->dtype == FA_FLOAT32) continue;
        fa_cuda_say(why, size, "%s.dtype is %s", names[i], fa_dtype_name(views[i]->dtype));
        return true;
    }
    return false;
}

bool fa_cuda_refuse_tf32(const fa_problem *p, char *why, size_t size)
{
    if (fa_cuda_refuse_other_than_float32(p, why, size)) return true;
    if (p->precision == FA_PRECISION_TF32) return false;
    fa_cuda_say(why, size, "options.precision is not FA_PRECISION_TF32");
    return true;
}

bool fa_cuda_refuse_dtypes(const fa_problem *p, bool bfloat, char *why, size_t size)
{
    const struct {
        const char *name;
        fa_dtype dtype;
    } tensors[] = {{"q", p->q.dtype}, {"k", p->k.dtype}, {"v", p->v.dtype}, {"out", p->out.dtype}};
    for (int i = 0; i < 4; i++) {
        const fa_dtype dtype = tensors[i].dtype;
        if (dtype == p->q.dtype && (dtype == FA_FLOAT16 || (dtype == FA_BFLOAT16 && bfloat)))
            continue;
        fa_cuda_say(why, size, "%s.dtype is %s", tensors[i].name, fa_dtype_name(dtype));
        return true;
    }
    return false;
}

bool fa_cuda_refuse_rows(const fa_problem *p, int64_t max, char *why, size_t size)
{
    if (p->rows_q <= max && p->n_k <= max) return false;
    fa_cuda_say(why, size, "%s.shape[1] is %" PRId64, p->rows_q > max ? "q" : "k",
                p->rows_q > max ? p->rows_q : p->n_k);
    return true;
}

bool fa_cuda_refuse_options(const fa_problem *p, char *why, size_t size)
{
    if (!p->attention_chunk) return false;
    fa_cuda_say(why, size, "options.attention_chunk is %" PRId64, p->attention_chunk);
    return true;
}

bool fa_cuda_refuse_block_strides(const fa_problem *p, char *why, size_t size)
{
    const struct {
        const char *name;
        const fa_view *view;
        bool batch;
    } tensors[] = {{"q", &p->q, !p->cu_seqlens_q},
                   {"k", &p->k, !p->cu_seqlens_k && !p->block_table},
                   {"v", &p->v, !p->cu_seqlens_k && !p->block_table},
                   {"dout", &p->dout, p->dout.data && !p->cu_seqlens_q}};
    for (int i = 0; i < 4; i++) {
        const int64_t stride = tensors[i].view->stride[0];
        const int64_t whole = 16 / FA_ELEMENT_BYTES((fa_element)tensors[i].view->dtype);
        if (!p->batch_invariant || !tensors[i].batch || (stride >= 0 && stride % whole == 0))
            continue;
        fa_cuda_say(why, size, "%s.stride[0] is %" PRId64 ", not made of whole 16 bytes",
                    tensors[i].name, stride);
        return true;
    }
    return false;
}

bool fa_cuda_changes_scores(const fa_problem *p)
{
    return p->softcap > 0 || p->alibi_slopes || p->bias.data || p->mask.data ||
           p->dropout_threshold;
}

bool fa_cuda_has_own_lengths(const fa_problem *p)
{
    return p->cu_seqlens_q || p->cu_seqlens_k || p->seqlens_q || p->seqlens_k;
}

int64_t fa_cuda_count_tiles(int64_t rows, int64_t tile) { return (rows + tile - 1) / tile; }

uint32_t fa_cuda_grid(int64_t tasks)
{
    const int64_t max = 2147483647; /* of a grid's first axis */
    return (uint32_t)(tasks < max ? tasks : max);
}

size_t fa_cuda_aligned(size_t bytes)
{
    enum { ALIGNMENT = 256 };
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

void fa_cuda_set_tasks(fa_cuda_plan_launch *l, int64_t tiles, int64_t tasks)
{
    l->tiles = tiles;
    l->tasks = tasks;
    l->grid = fa_cuda_grid(tasks);
    l->idle = tasks == 0;
}

void fa_cuda_set_query_tasks(const fa_problem *p, int tile_q, fa_cuda_plan_launch *l)
{
    const int64_t tiles = p->cu_seqlens_q ? FA_PACKED_TILES(p->rows_q, tile_q, p->batch)
                                          : fa_cuda_count_tiles(p->rows_q, tile_q);
    l->tile_q = tile_q;
    fa_cuda_set_tasks(l, tiles, tiles * p->heads_q * (p->cu_seqlens_q ? 1 : p->batch));
}

void fa_cuda_set_key_tasks(const fa_problem *p, int tile_k, fa_cuda_plan_launch *l)
{
    int64_t tiles = fa_cuda_count_tiles(p->rows_k, tile_k), outer = p->batch;
    if (p->cu_seqlens_k) tiles = FA_PACKED_TILES(p->rows_k, tile_k, p->batch), outer = 1;
    if (p->block_table) tiles *= p->blocks_k, outer = 1;
    l->tile_k = tile_k;
    fa_cuda_set_tasks(l, tiles, tiles * p->heads_kv * outer);
}
