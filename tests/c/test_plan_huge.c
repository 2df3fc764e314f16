/*
 * Plans of problems with billions of rows, heads or sequences, which do not overflow: under the sanitizers no integer does, and in
 * every build launches and workspaces are plausible. Data is not needed, as with fa_supported.
 */
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "cuda/family.h"
#include "gpus.h"
#include "normalize.h"

enum { PROBLEMS = 30000 };
#define MOST_ELEMENTS ((int64_t)1 << 42) /* of a tensor: 30 times as many as a GPU has room for */

static uint64_t state = 1;
static uint64_t draw(uint64_t n)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (state >> 33) % n;
}
static bool one_in(uint64_t n) { return draw(n) == 0; }

/* From 1 to most; each order of magnitude is as probable as another one. */
static int64_t draw_extent(int64_t most)
{
    int bits = 0;
    while (most >> (bits + 1)) bits++;
    const int64_t power = (int64_t)1 << draw((uint64_t)bits + 1);
    const int64_t n = power + (int64_t)draw((uint64_t)(power < INT32_MAX ? power : INT32_MAX));
    return n < most ? n : most;
}

/* Often the most. */
static int64_t draw_distance(int64_t most) { return one_in(4) ? most : draw_extent(most); }

typedef struct call {
    fa_tensor q, k, v, out;
    fa_options options;
    int32_t lengths[4];
    float numbers[4];
    fa_tensor bias;
} call;

static void draw_options(call *c)
{
    fa_options *o = &c->options;
    o->size = sizeof *o;
    if (one_in(2)) o->flags |= FA_CAUSAL;
    if (one_in(5)) {
        o->flags |= FA_DIAGONAL;
        o->diagonal = (one_in(2) ? 1 : -1) * draw_distance((int64_t)1 << 62);
    }
    if (one_in(3)) {
        o->flags |= FA_WINDOW;
        o->window_left = one_in(3) ? -1 : draw_distance((int64_t)5 << 60);
        o->window_right = one_in(3) ? -1 : draw_distance((int64_t)5 << 60);
    }
    if (one_in(4)) o->flags |= FA_DETERMINISTIC;
    if (one_in(6)) o->flags |= FA_BATCH_INVARIANT;
    if (one_in(8)) o->softcap = 30;
    if (one_in(8)) o->alibi_slopes = c->numbers;
    if (one_in(8)) o->sinks = c->numbers;
    if (one_in(10)) o->dropout_p = 0.25f;
    if (one_in(3)) o->precision = (fa_precision)draw(3);
}

static void draw_call(call *c)
{
    static const int64_t dims[] = {1, 64, 72, 96, 128, 192, 256, 512, 576};
    static const fa_dtype dtypes[] = {FA_BFLOAT16, FA_FLOAT16, FA_FLOAT32, FA_FLOAT8_E4M3};
    memset(c, 0, sizeof *c);
    draw_options(c);
    int64_t extents[3], left;
    const int64_t d = dims[draw(9)];
    const fa_dtype dtype = dtypes[draw(12) * draw(12) % 4], keys = one_in(6) ? FA_INT8 : dtype;
    const uint64_t first = draw(3);
    left = MOST_ELEMENTS / d;
    for (uint64_t i = 0; i < 3; i++) { /* of the batch, a sequence, heads */
        const uint64_t axis = (first + i) % 3;
        extents[axis] = draw_extent(left);
        left /= extents[axis];
    }
    if (one_in(3)) extents[1] = draw_extent(64);
    const int64_t batch = extents[0], most = extents[2];
    const int64_t group = one_in(2) ? 1 : draw_extent(one_in(4) || most < 64 ? most : 64);
    const int64_t heads_kv = most / group, heads = heads_kv * group;
    const int64_t n_k = one_in(2) ? extents[1] : draw_extent(MOST_ELEMENTS / d / batch / heads_kv);
    const int64_t d_v = one_in(4) || d > 512 ? dims[draw(8)] : d;
    c->q = fa_bshd(NULL, dtype, batch, extents[1], heads, d);
    c->k = fa_bshd(NULL, keys, batch, n_k, heads_kv, d);
    c->v = fa_bshd(NULL, keys, batch, n_k, heads_kv, d_v);
    c->out =
        fa_bshd(NULL, dtype == FA_FLOAT8_E4M3 ? FA_BFLOAT16 : dtype, batch, extents[1], heads, d_v);
    const uint64_t kind = draw(8);
    if (kind == 0) { /* packed */
        c->q = fa_bshd(NULL, dtype, 1, batch * extents[1], heads, d);
        c->out = fa_bshd(NULL, c->out.dtype, 1, batch * extents[1], heads, d_v);
        c->k = fa_bshd(NULL, keys, 1, batch * n_k, heads_kv, d);
        c->v = fa_bshd(NULL, keys, 1, batch * n_k, heads_kv, d_v);
        c->options.num_sequences = batch;
        c->options.cu_seqlens_q = c->options.cu_seqlens_k = c->lengths;
        if (one_in(2)) c->options.max_seqlen_q = extents[1], c->options.max_seqlen_k = n_k;
    } else if (kind == 1) { /* pages */
        const int64_t rows = (int64_t)1 << draw(9);
        c->k = fa_bshd(NULL, keys, batch * n_k / rows + 1, rows, heads_kv, d);
        c->v = fa_bshd(NULL, keys, batch * n_k / rows + 1, rows, heads_kv, d_v);
        c->options.block_table = c->options.seqlens_k = c->lengths;
        c->options.block_table_stride = n_k / rows + 1;
    } else if (kind == 2) c->options.seqlens_k = c->lengths;
    else if (kind == 3) c->options.seqlens_q = c->lengths;
    if (one_in(10)) {
        c->bias = fa_bshd(NULL, c->out.dtype, 1, one_in(2) ? 1 : heads, c->q.shape[1], n_k);
        if (kind > 1) c->options.bias = &c->bias;
    }
}

static fa_status make_problem(const call *c, fa_pass pass, fa_problem *p)
{
    const fa_arguments a = {.pass = pass,
                            .device = FA_DEVICE_CUDA,
                            .dry_run = true,
                            .q = &c->q,
                            .k = &c->k,
                            .v = &c->v,
                            .out = &c->out,
                            .options = &c->options};
    return fa_problem_make(&a, p);
}

static const char *text_of(const fa_problem *p)
{
    static char text[256];
    snprintf(text, sizeof text,
             "pass %d, batch %lld, heads %lld/%lld, rows %lldx%lld of %lldx%lld, d %lld, %lld, "
             "dtype %d, window %lld, %lld",
             (int)p->pass, (long long)p->batch, (long long)p->heads_q, (long long)p->heads_kv,
             (long long)p->n_q, (long long)p->n_k, (long long)p->rows_q, (long long)p->rows_k,
             (long long)p->d, (long long)p->d_v, (int)p->q.dtype, (long long)p->window_left,
             (long long)p->window_right);
    return text;
}

static void check_plan(const fa_problem *p, const fa_cuda_plan *plan)
{
    const size_t most = (size_t)1 << 62;
    CHECK(plan->workspace_bytes < most, "%s, %s: %zu bytes of workspace", plan->family->name,
          text_of(p), plan->workspace_bytes);
    for (int i = 0; i < plan->count; i++) {
        const fa_cuda_plan_launch *l = &plan->launches[i];
        const char *name = fa_variants[l->variant].name;
        CHECK(l->grid <= INT32_MAX && (l->grid > 0 || l->tasks == 0), "%s, %s: grid %u", name,
              text_of(p), l->grid);
        CHECK(l->tasks >= 0 && l->tiles >= 0, "%s, %s: %lld tasks, %lld tiles", name, text_of(p),
              (long long)l->tasks, (long long)l->tiles);
        CHECK(l->workspace_offset <= plan->workspace_bytes &&
                  l->workspace_bytes <= plan->workspace_bytes - l->workspace_offset,
              "%s, %s: %zu bytes from %zu on", name, text_of(p), l->workspace_bytes,
              l->workspace_offset);
    }
}

/* A window's bound is no bound if it hides nothing: kernels may add positions and a diagonal to any other one. */
static void test_windows(void)
{
    const int64_t far = (int64_t)1 << 62, half = far / 2;
    const struct {
        int64_t diagonal, left, right, kept_left, kept_right;
    } cases[] = {
        {0, INT64_MAX, INT64_MAX, -1, -1},
        {0, half, 5, -1, 5},
        {0, half - 1, half - 1, half - 1, half - 1},
        {far, far, far, far, -1}, /* the diagonal is beyond all keys: the left bound counts */
        {far, INT64_MAX, 0, -1, 0},
        {-far, far, far, -1, far},
        {-far, 0, INT64_MAX, 0, -1},
        {7, -1, -1, -1, -1}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        static call c;
        fa_problem p;
        memset(&c, 0, sizeof c);
        c.q = c.k = c.v = c.out = fa_bshd(NULL, FA_FLOAT16, 1, 64, 1, 64);
        c.options = (fa_options){.size = sizeof c.options,
                                 .flags = FA_WINDOW | FA_DIAGONAL,
                                 .diagonal = cases[i].diagonal,
                                 .window_left = cases[i].left,
                                 .window_right = cases[i].right};
        const fa_status status = make_problem(&c, FA_PASS_FORWARD, &p);
        CHECK(status == FA_OK && p.window_left == cases[i].kept_left &&
                  p.window_right == cases[i].kept_right,
              "case %zu: %lld, %lld", i, (long long)p.window_left, (long long)p.window_right);
    }
}

int main(void)
{
    static const fa_pass passes[] = {FA_PASS_FORWARD, FA_PASS_BACKWARD, FA_PASS_DECODE,
                                     FA_PASS_WEIGHTS};
    int planned = 0;
    test_begin();
    test_windows();
    for (int i = 0; i < PROBLEMS; i++) {
        static call c;
        static fa_cuda_plan plan;
        char why[320];
        fa_problem p;
        draw_call(&c);
        if (make_problem(&c, passes[i % 4], &p) != FA_OK) continue;
        for (int device = 0; device < DEVICES; device++) {
            if (!fa_cuda_plan_make(&p, &devices[device], NULL, &plan, why, sizeof why)) continue;
            check_plan(&p, &plan);
            fa_cuda_plan_describe(&p, &devices[device], &plan, why, sizeof why);
            planned++;
        }
    }
    CHECK(planned > PROBLEMS, "%d plans", planned);
    printf("%d plans\n", planned);
    return test_end();
}
