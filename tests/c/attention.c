#include "attention.h"

#include <math.h>
#include <string.h>

const fa_dtype float_dtypes[3] = {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16};

static fa_tensor make_tensor(attention *a, const char *name, fa_dtype dtype,
                             const int64_t extents[4], const ref_layout *layout)
{
    static const ref_layout contiguous = REF_LAYOUT_CONTIGUOUS;
    fa_tensor t = {0};
    t.dtype = dtype;
    memcpy(t.shape, extents, sizeof t.shape);
    ref_buffers_tensor(&a->buffers, name, &t, layout ? layout : &contiguous);
    return t;
}

static float *make_floats(attention *a, const char *name, int64_t n)
{
    return ref_buffers_new(&a->buffers, name, (size_t)n * sizeof(float), sizeof(float));
}

static float *make_output_floats(attention *a, const char *name, int64_t n)
{
    float *x = make_floats(a, name, n);
    ref_buffers_whole_output(&a->buffers, x);
    return x;
}

void attention_fill(attention *a, const fa_tensor *t, double amplitude)
{
    for (int64_t i = 0; i < t->shape[0]; i++)
        for (int64_t j = 0; j < t->shape[1]; j++)
            for (int64_t k = 0; k < t->shape[2]; k++)
                for (int64_t l = 0; l < t->shape[3]; l++)
                    ref_store(t, i, j, k, l, amplitude * ref_random_normal(&a->random));
}

/* A layout without broadcasting, for tensors that are written. */
static ref_layout written(const ref_layout *layout)
{
    ref_layout l = REF_LAYOUT_CONTIGUOUS;
    if (layout) l = *layout;
    memset(l.broadcast, 0, sizeof l.broadcast);
    return l;
}

static void make_inputs(attention *a, const int64_t q[4], const int64_t k[4], const int64_t v[4],
                        fa_dtype dtype, const ref_layout *lq, const ref_layout *lk,
                        const ref_layout *lv)
{
    a->in.q = make_tensor(a, "q", dtype, q, lq);
    a->in.k = make_tensor(a, "k", dtype, k, lk);
    a->in.v = make_tensor(a, "v", dtype, v, lv);
    attention_fill(a, &a->in.q, 1);
    attention_fill(a, &a->in.k, 1);
    attention_fill(a, &a->in.v, 1);
}

void attention_make_as(attention *a, uint64_t seed, shape s, fa_dtype dtype, const ref_layout *q,
                       const ref_layout *k, const ref_layout *v, const ref_layout *out)
{
    const int64_t q_shape[4] = {s.batch, s.n_q, s.heads_q, s.d};
    const int64_t k_shape[4] = {s.batch, s.n_k, s.heads_kv, s.d};
    const int64_t v_shape[4] = {s.batch, s.n_k, s.heads_kv, s.d_v};
    const int64_t out_shape[4] = {s.batch, s.n_q, s.heads_q, s.d_v};
    const ref_layout lq = written(q), lk = written(k), lv = written(v), lo = written(out);
    memset(a, 0, sizeof *a);
    a->s = s;
    a->random.state = seed;
    a->in.options.size = sizeof a->in.options;
    a->in.options.threads = 1 + (int32_t)(seed % 3);
    make_inputs(a, q_shape, k_shape, v_shape, dtype, q, k, v);
    a->in.rounding = ref_rounding_for(&a->in, dtype, true);
    a->out = make_tensor(a, "out", dtype, out_shape, &lo);
    a->dout = make_tensor(a, "dout", dtype, out_shape, out);
    attention_fill(a, &a->dout, 1);
    a->dq = make_tensor(a, "dq", dtype, q_shape, &lq);
    a->dk = make_tensor(a, "dk", dtype, k_shape, &lk);
    a->dv = make_tensor(a, "dv", dtype, v_shape, &lv);
    const fa_tensor *outputs[] = {&a->out, &a->dq, &a->dk, &a->dv};
    for (int n = 0; n < 4; n++) ref_buffers_output(&a->buffers, outputs[n]);
    a->lse = make_output_floats(a, "lse", s.batch * s.heads_q * s.n_q);
}

void attention_make(attention *a, uint64_t seed, shape s, fa_dtype dtype)
{
    attention_make_as(a, seed, s, dtype, NULL, NULL, NULL, NULL);
}

void attention_free(attention *a) { ref_buffers_free(&a->buffers); }

const char *option_name(option o)
{
    static const char *const names[] = {"causal", "diagonal", "window", "scale", "softcap",
                                        "bias",   "mask",     "alibi",  "sinks", "dropout"};
    return names[o];
}

static int64_t between(attention *a, int64_t low, int64_t high)
{
    return ref_random_between(&a->random, low, high);
}

static void set_bias(attention *a)
{
    const int64_t extents[4] = {a->s.batch, a->s.heads_q, a->s.n_q, a->s.n_k};
    ref_layout layout = ref_layout_random(&a->random, true, true);
    a->bias = make_tensor(a, "bias", a->in.q.dtype, extents, &layout);
    attention_fill(a, &a->bias, 1);
    a->in.options.bias = &a->bias;
    a->dbias = make_tensor(a, "dbias", FA_FLOAT32, extents, NULL);
    ref_buffers_output(&a->buffers, &a->dbias);
}

static void set_mask(attention *a)
{
    const int64_t extents[4] = {a->s.batch, a->s.heads_q, a->s.n_q, a->s.n_k};
    ref_layout layout = ref_layout_random(&a->random, true, true);
    memset(layout.broadcast, 0, sizeof layout.broadcast);
    a->mask = make_tensor(a, "mask", FA_BOOL, extents, &layout);
    for (int64_t b = 0; b < extents[0]; b++)
        for (int64_t h = 0; h < extents[1]; h++)
            for (int64_t i = 0; i < extents[2]; i++)
                for (int64_t j = 0; j < extents[3]; j++)
                    ref_store(&a->mask, b, h, i, j, i % 5 != 2 && between(a, 0, 3) > 0);
    a->in.options.mask = &a->mask;
}

static float *random_floats(attention *a, const char *name, int64_t n)
{
    float *x = make_floats(a, name, n);
    for (int64_t i = 0; i < n; i++) x[i] = (float)(0.3 * ref_random_normal(&a->random));
    return x;
}

void attention_set(attention *a, option o)
{
    fa_options *options = &a->in.options;
    switch (o) {
    case OPTION_CAUSAL: options->flags |= FA_CAUSAL; break;
    case OPTION_DIAGONAL:
        options->flags |= FA_DIAGONAL;
        options->diagonal = between(a, -a->s.n_q / 2, a->s.n_k / 2);
        break;
    case OPTION_WINDOW:
        options->flags |= FA_WINDOW;
        options->window_left = between(a, 0, a->s.n_k / 2);
        options->window_right = between(a, 0, a->s.n_k / 2);
        break;
    case OPTION_SCALE:
        options->flags |= FA_SCALE;
        options->scale = -0.37f;
        break;
    case OPTION_SOFTCAP: options->softcap = 1.5f; break;
    case OPTION_BIAS: set_bias(a); break;
    case OPTION_MASK: set_mask(a); break;
    case OPTION_ALIBI:
        options->alibi_slopes = random_floats(a, "alibi_slopes", a->s.heads_q);
        break;
    case OPTION_SINKS:
        options->sinks = random_floats(a, "sinks", a->s.heads_q);
        a->dsinks = make_output_floats(a, "dsinks", a->s.heads_q);
        break;
    case OPTION_DROPOUT:
        options->dropout_p = 0.3f;
        options->dropout_seed = ref_random_bits(&a->random);
        options->dropout_offset = ref_random_bits(&a->random);
        break;
    case NUM_OPTIONS: break;
    }
}

static void poison_tensor(const fa_tensor *t)
{
    for (int64_t i = 0; i < t->shape[0]; i++)
        for (int64_t j = 0; j < t->shape[1]; j++)
            for (int64_t k = 0; k < t->shape[2]; k++)
                for (int64_t l = 0; l < t->shape[3]; l++) ref_store(t, i, j, k, l, (double)NAN);
}

static int64_t lse_count(const attention *a)
{
    return a->in.q.shape[0] * a->in.q.shape[1] * a->in.q.shape[2];
}

void attention_poison(attention *a)
{
    const fa_tensor *outputs[] = {&a->out, &a->dq, &a->dk, &a->dv};
    for (int n = 0; n < 4; n++) poison_tensor(outputs[n]);
    if (a->dbias.data) poison_tensor(&a->dbias);
    for (int64_t n = 0; n < lse_count(a); n++) a->lse[n] = NAN;
    for (int64_t n = 0; a->dsinks && n < a->s.heads_q; n++) a->dsinks[n] = NAN;
}

static bool succeeded(fa_status status, const char *call, const char *what)
{
    CHECK(status == FA_OK, "%s: %s: %s", what, call, status == FA_OK ? "" : fa_last_error());
    return status == FA_OK;
}

bool attention_forward(attention *a, const char *what)
{
    fa_status status = fa_forward(&a->in.q, &a->in.k, &a->in.v, &a->out, a->lse, &a->in.options);
    return succeeded(status, "fa_forward", what);
}

bool attention_backward(attention *a, const char *what)
{
    fa_gradients g;
    memset(&g, 0, sizeof g);
    g.size = sizeof g;
    g.dout = a->dout;
    g.dlse = a->dlse;
    g.dq = a->dq;
    g.dk = a->dk;
    g.dv = a->dv;
    g.dbias = a->dbias;
    g.dsinks = a->dsinks;
    fa_status status =
        fa_backward(&a->in.q, &a->in.k, &a->in.v, &a->out, a->lse, &g, &a->in.options);
    return succeeded(status, "fa_backward", what);
}

static void finish(attention *a, ref_report *report, const char *what)
{
    ref_buffers_check(&a->buffers, report);
    CHECK(report->ok, "%s: %s", what, report->message);
}

static void compare_forward(attention *a, const char *what)
{
    ref_report report = REF_REPORT_INIT;
    ref_array out, lse;
    ref_forward(&a->in, &out, &lse);
    ref_check_tensor(&report, "out", &a->out, &out);
    ref_check_floats(&report, "lse", a->lse, &lse);
    ref_array_free(&out);
    ref_array_free(&lse);
    finish(a, &report, what);
}

void attention_check_forward(attention *a, const char *what)
{
    ref_buffers_freeze(&a->buffers);
    if (attention_forward(a, what)) compare_forward(a, what);
}

void attention_check_decode(attention *a, const char *what)
{
    ref_buffers_freeze(&a->buffers);
    fa_status status = fa_decode(&a->in.q, &a->in.k, &a->in.v, &a->out, a->lse, &a->in.options);
    if (succeeded(status, "fa_decode", what)) compare_forward(a, what);
}

void attention_check_backward(attention *a, const char *what)
{
    ref_report report = REF_REPORT_INIT;
    ref_gradients want;
    ref_buffers_freeze(&a->buffers);
    if (!attention_forward(a, what) || !attention_backward(a, what)) return;
    ref_backward(&a->in, &a->dout, a->dlse, a->dbias.data ? a->dbias.shape : NULL, &want);
    ref_check_tensor(&report, "dq", &a->dq, &want.dq);
    ref_check_tensor(&report, "dk", &a->dk, &want.dk);
    ref_check_tensor(&report, "dv", &a->dv, &want.dv);
    if (a->dbias.data) ref_check_tensor(&report, "dbias", &a->dbias, &want.dbias);
    if (a->dsinks) ref_check_floats(&report, "dsinks", a->dsinks, &want.dsinks);
    ref_gradients_free(&want);
    finish(a, &report, what);
}

bool same_bits(const fa_tensor *x, const fa_tensor *y)
{
    for (int64_t i = 0; i < x->shape[0]; i++)
        for (int64_t j = 0; j < x->shape[1]; j++)
            for (int64_t k = 0; k < x->shape[2]; k++)
                for (int64_t l = 0; l < x->shape[3]; l++) {
                    double u = ref_load(x, i, j, k, l), v = ref_load(y, i, j, k, l);
                    if (memcmp(&u, &v, sizeof u) != 0 && !(isnan(u) && isnan(v))) return false;
                }
    return true;
}
