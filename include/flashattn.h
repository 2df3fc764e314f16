/*
 * flashattn: exact attention in plain C.
 *
 *     out = softmax(scale * Q K^T + ...) V
 *
 * computed block by block with an online softmax, so that the n_q x n_k matrix of weights is never
 * stored (FlashAttention: Dao et al. 2022, arXiv:2205.14135; FlashAttention-2: Dao 2023,
 * arXiv:2307.08691).
 *
 * CONTENTS
 *   1. Version
 *   2. Status and errors
 *   3. Tensors
 *   4. Options, and what each one means
 *   5. The calls: fa_forward, fa_backward, fa_decode, fa_append, fa_combine, fa_weights
 *   6. Asking first: fa_supported, fa_describe, fa_workspace_size
 *   7. Devices
 *
 * THE SHORTEST USE
 *     fa_tensor q = fa_bshd(q_data, FA_FLOAT32, batch, n_q, heads, dim);
 *     fa_tensor k = fa_bshd(k_data, FA_FLOAT32, batch, n_k, heads, dim);
 *     fa_tensor v = fa_bshd(v_data, FA_FLOAT32, batch, n_k, heads, dim);
 *     fa_tensor o = fa_bshd(o_data, FA_FLOAT32, batch, n_q, heads, dim);
 *     if (fa_forward(&q, &k, &v, &o, NULL, NULL) != FA_OK) puts(fa_last_error());
 *
 * RULES THAT HOLD EVERYWHERE
 *   - The library never prints, exits or aborts. Every call that can fail returns an fa_status, and
 *     fa_last_error() then holds a sentence naming the argument, its value and what was expected.
 *     After an error, outputs hold unspecified values, and nothing else has changed.
 *   - Thread safety: every function may be called from any number of threads at once, also from
 *     inside OpenMP regions, as long as no two calls write the same memory. fa_last_error() is kept
 *     per thread.
 *   - Processes: calls on the CPU work, with threads, in the child of a fork, whatever the parent's
 *     threads were doing. (CUDA itself does not work in the child of a process that has used it.) A
 *     shared library that has been loaded stays: dlclose does not take it away from its threads.
 *   - Aliasing: outputs must not overlap inputs or each other. Inputs may overlap each other.
 *   - Alignment: data pointers must be aligned to their element's size; nothing more is needed.
 *   - Sizes and strides are 64-bit and count elements, never bytes. Tensors may hold more than 2^31
 *     elements.
 *   - Inputs that no query may see (padding behind a sequence's length, unused pages, masked keys)
 *     never reach a result, not even when they hold NaN.
 */
#ifndef FLASHATTN_H
#define FLASHATTN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(FA_BUILD_SHARED) && (defined(__GNUC__) || defined(__clang__))
#define FA_API __attribute__((visibility("default")))
#else
#define FA_API
#endif

/* ------------------------------------------------------------------------------------------------
 * 1. Version
 * ---------------------------------------------------------------------------------------------- */

/* The version is written here alone; the build reads it. */
#define FA_VERSION_MAJOR 0
#define FA_VERSION_MINOR 1
#define FA_VERSION_PATCH 0

/* The version of the library that is loaded: major * 10000 + minor * 100 + patch. */
FA_API int fa_version(void);

/* The same as text, for example "0.1.0". */
FA_API const char *fa_version_string(void);

/* ------------------------------------------------------------------------------------------------
 * 2. Status and errors
 * ---------------------------------------------------------------------------------------------- */

/* The values are pinned: they never change meaning. */
typedef enum fa_status {
    FA_OK = 0,
    FA_ERROR_ARGUMENT = 1,    /* an argument is wrong: shape, stride, dtype, pointer, option      */
    FA_ERROR_UNSUPPORTED = 2, /* legal, but this backend cannot do it; the message names the option */
    FA_ERROR_MEMORY = 3,      /* an allocation failed                                             */
    FA_ERROR_DEVICE = 4,      /* no such device or driver, or the device reported an error        */
    FA_ERROR_WORKSPACE = 5    /* the workspace is missing or too small                            */
} fa_status;

/* The name of a status, for example "FA_ERROR_ARGUMENT"; "unknown status" for any other value. */
FA_API const char *fa_status_name(fa_status status);

/* What went wrong in this thread's latest call that failed; "" if none has failed. The text stays
 * valid until this thread's next failing call. Never NULL. */
FA_API const char *fa_last_error(void);

/* ------------------------------------------------------------------------------------------------
 * 3. Tensors
 * ---------------------------------------------------------------------------------------------- */

typedef enum fa_dtype {
    FA_FLOAT32 = 0,
    FA_FLOAT16 = 1,     /* IEEE 754 binary16                                                      */
    FA_BFLOAT16 = 2,    /* the upper half of a float32                                            */
    FA_FLOAT8_E4M3 = 3, /* OCP 8-bit float, 4 exponent bits, no infinities; inputs only           */
    FA_BOOL = 4,        /* one byte; 0 is false, anything else is true; masks only                */
    FA_INT8 = 5         /* -127 to 127 times a scale; caches of keys and values only              */
} fa_dtype;

/* Bytes per element; 0 for an unknown dtype. */
FA_API size_t fa_dtype_size(fa_dtype dtype);

/* The name, for example "float32"; "unknown dtype" for any other value. */
FA_API const char *fa_dtype_name(fa_dtype dtype);

/*
 * A strided 4-D view of memory that the caller owns, on the host or on a CUDA device.
 *
 * For q, k, v, out and their gradients the axes are (batch, sequence, head, dim); for bias, mask and
 * weights they are (batch, head, query, key). Element (a, b, c, d) lies at
 *     data + (a*stride[0] + b*stride[1] + c*stride[2] + d*stride[3]) * element size.
 * Strides count elements. They may be negative or 0 (broadcast) in inputs. For q, k, v, out and their
 * gradients stride[3] must be 1 (where shape[3] > 1); bias and mask may have any strides. In an output
 * no two elements may share an address. data may be NULL where some extent is 0.
 */
typedef struct fa_tensor {
    void *data;
    fa_dtype dtype;
    int64_t shape[4];
    int64_t stride[4];
} fa_tensor;

/* A contiguous tensor in memory order (batch, sequence, head, dim). */
FA_API fa_tensor fa_bshd(void *data, fa_dtype dtype, int64_t batch, int64_t sequence, int64_t heads,
                         int64_t dim);

/* A contiguous tensor in memory order (batch, head, sequence, dim). The axes of the result are still
 * (batch, sequence, head, dim): only the strides differ. */
FA_API fa_tensor fa_bhsd(void *data, fa_dtype dtype, int64_t batch, int64_t sequence, int64_t heads,
                         int64_t dim);

/* ------------------------------------------------------------------------------------------------
 * 4. Options, and what each one means
 * ---------------------------------------------------------------------------------------------- */

typedef enum fa_device {
    FA_DEVICE_AUTO = 0, /* CUDA if q lies in device memory, else the CPU */
    FA_DEVICE_CPU = 1,
    FA_DEVICE_CUDA = 2
} fa_device;

/* How exactly float32 inputs are multiplied. It counts where q, k and v are float32; other types are
 * multiplied as they are, and ignore it. A backend may always be more exact than asked: the CPU computes
 * in float32 whatever is asked, and so does CUDA where it has no kernels with fewer bits (fa_weights,
 * backward of head dims above 256 with less shared memory than Hopper has, older devices). fa_describe
 * says what a call does. All sums are float32. */
typedef enum fa_precision {
    FA_PRECISION_FLOAT32 = 0, /* errors of float32's size, by whatever products are fastest       */
    FA_PRECISION_TF32 = 1,    /* operands of products, the weights too, may be rounded to 11 bits on
                               * tensor cores: to tf32, or to float16 times a power of two for
                               * each row                                                         */
    FA_PRECISION_IEEE = 2     /* products and sums of float32 numbers in IEEE 754's arithmetic    */
} fa_precision;

/* Bits of fa_options.flags. */
enum {
    FA_CAUSAL = 1 << 0,        /* query i sees only keys j <= i + diagonal                        */
    FA_DIAGONAL = 1 << 1,      /* the field diagonal counts; without it diagonal = n_k - n_q      */
    FA_WINDOW = 1 << 2,        /* the fields window_left and window_right count                   */
    FA_SCALE = 1 << 3,         /* the field scale counts even if it is 0                          */
    FA_DETERMINISTIC = 1 << 4, /* the same bits from run to run, backward too (the CPU: always)   */
    FA_BATCH_INVARIANT = 1 << 5 /* a sequence's bits do not depend on what else is in the batch
                                   (the CPU: always)                                              */
};

/*
 * What the options mean, the same on every backend. For batch item b, query head h (which reads
 * key/value head h / (Hq/Hkv)), query i in [0, n_q) and key j in [0, n_k), n_q and n_k being the
 * lengths of that batch item:
 *
 *   1. x = scale * (q_i . k_j)
 *   2. x = softcap * tanh(x / softcap)                     if softcap > 0
 *   3. x = x - slope_h * |i + diagonal - j|                if alibi_slopes
 *   4. x = x + bias[b, h, i, j]                            if bias
 *   5. x = -infinity unless query i may see key j. It may if every one of these allows it:
 *        FA_CAUSAL:  j <= i + diagonal
 *        FA_WINDOW:  i + diagonal - window_left <= j <= i + diagonal + window_right  (-1: no limit)
 *        attention_chunk c > 0:  floor(j / c) = floor((i + diagonal) / c): the key is in the chunk of c
 *                    positions that the query is in
 *        mask:       mask[b, h, i, j] != 0
 *   6. lse_i = log( sum_j exp(x_ij) + exp(sink_h) )        natural logarithm; the sink's term if sinks
 *   7. p_ij  = exp(x_ij - lse_i)
 *   8. p_ij  = keep_ij ? p_ij / (1 - dropout_p) : 0        if dropout_p > 0; lse is left alone
 *   9. out_i = sum_j p_ij v_j
 *
 * diagonal is n_k - n_q unless FA_DIAGONAL is set: the masks are aligned to the bottom right, so that
 * the last query sees the last key, as in FlashAttention 2.1 and later. It is computed for each batch
 * item from that item's own lengths.
 *
 * A query that sees no key gives out = 0 and lse = -infinity (with a sink: out = 0, lse = sink), and
 * its gradients are exactly 0. A sequence of length 0 is legal. A logit of +infinity or NaN makes its
 * own row NaN and no other.
 *
 * dropout: keep_ij = (r >= t), t = min(round(65536 * dropout_p), 65535) (t = 0: no dropout), where r is
 * the 16-bit half (2*((j>>3)&3) + (j&1)) (little endian) of the 128-bit block
 * Philox-4x32-7(counter, key) (Salmon et al., SC 2011), with
 *   counter = { 4*(j>>5) + ((j>>1)&3), i, b*Hq + h + hi(offset), lo(offset) },
 *   key     = { lo(seed), hi(seed) },
 * lo and hi being the 32-bit halves and all sums modulo 2^32. The same bits come out on every backend,
 * in forward and backward.
 *
 * Lengths. Three ways to say them, separately for the queries and for the keys and values:
 *   - equal lengths: n_q = q.shape[1], n_k = k.shape[1];
 *   - padded: seqlens_q[b] (seqlens_k[b]) of the rows of batch item b are used, the rest is ignored;
 *   - packed: cu_seqlens_q (cu_seqlens_k) has num_sequences + 1 non-decreasing entries; sequence b is
 *     rows cu[b] .. cu[b+1]-1 of a tensor whose shape[0] is 1. If seqlens is given as well, only the
 *     first seqlens[b] rows of that range are used.
 * Rows of out (and of dq, dk, dv) that belong to no sequence are set to 0, and those of lse to
 * -infinity.
 *
 * Paged keys and values: with block_table, k and v have shape (pages, page_size, Hkv, dim), and key j
 * of batch item b is row j % page_size of page block_table[b*block_table_stride + j/page_size].
 * seqlens_k is then required, and table entries behind a sequence's last page are not read.
 *
 * Wrong lengths, cumulative lengths, table entries and rows of fa_weights are an error on the CPU, which
 * names the array, the index and the value. On CUDA they lie in device memory, which the host does not
 * read: kernels take a length below 0 as 0 and one beyond the room that the tensor or the block table
 * has as that room, so that reads and writes stay inside; page numbers are followed as they are, and
 * max_seqlen_q and max_seqlen_k are believed: rows beyond the first may be left as they are. FA_CHECK=1
 * (section 7) finds them there, too.
 */
typedef struct fa_options {
    /* sizeof(fa_options) as the caller compiled it; 0 is read as the size in version 0.1. Fields
     * behind that size count as 0. A zeroed struct means plain softmax(Q K^T / sqrt(d)) V. */
    size_t size;

    uint32_t flags;   /* FA_CAUSAL | ...                                                           */
    fa_device device; /* where to compute                                                          */

    float scale;          /* 0 means 1/sqrt(d), unless FA_SCALE is set                             */
    float softcap;        /* 0: none; else > 0                                                     */
    int64_t diagonal;     /* needs FA_DIAGONAL                                                     */
    int64_t window_left;  /* needs FA_WINDOW; >= 0, or -1 for no limit                             */
    int64_t window_right; /* needs FA_WINDOW; >= 0, or -1 for no limit                             */

    const fa_tensor *bias; /* (batch, Hq, n_q, n_k), float32, float16 or bfloat16. An extent of 1
                            * broadcasts, as does a stride of 0. NULL: none                        */
    const fa_tensor *mask; /* the same shape, FA_BOOL: true means "may see". NULL: none            */

    const float *alibi_slopes;  /* float32 (Hq), or (batch, Hq) with a stride. NULL: none          */
    int64_t alibi_batch_stride; /* elements from one batch item's slopes to the next; 0: shared    */
    const float *sinks;         /* float32 (Hq): a logit without a value. NULL: none               */

    float dropout_p;               /* 0 <= p < 1                                                   */
    uint64_t dropout_seed;
    uint64_t dropout_offset;
    const uint64_t *dropout_state; /* {seed, offset} read when the kernel runs, in the device's own
                                    * memory; instead of the two fields above. For CUDA graphs      */

    int64_t num_sequences;       /* with cu_seqlens: how many; else 0                              */
    const int32_t *cu_seqlens_q; /* (num_sequences + 1). NULL: not packed                          */
    const int32_t *cu_seqlens_k;
    const int32_t *seqlens_q;    /* (batch). NULL: all rows are used                               */
    const int32_t *seqlens_k;
    int64_t max_seqlen_q; /* with cu_seqlens: a bound on the lengths, so that CUDA need not read   */
    int64_t max_seqlen_k; /* them; 0: unknown. On the CPU a bound that is too small is an error    */

    const int32_t *block_table; /* (batch, block_table_stride): page numbers. NULL: not paged      */
    int64_t block_table_stride; /* table entries per batch item                                    */

    const float *q_descale; /* float32 (batch, Hkv): inputs of 8 bits stand for data * descale.
                             * NULL: 1                                                             */
    const float *k_descale;
    const float *v_descale;

    int32_t threads; /* CPU: how many threads may work at once; 0: OpenMP's choice (one without
                      * OpenMP, or inside a parallel region), fewer for tiny problems. Fewer where
                      * there is less to do, or more cannot be started; never more than 1024. Never
                      * changes a bit of a result                                                  */
    int32_t reserved; /* 0 */

    void *stream;          /* CUDA: the CUstream (cudaStream_t) to work on; NULL: the default one  */
    void *workspace;       /* CUDA: device memory of fa_workspace_size() bytes, aligned to 256     */
    size_t workspace_size; /* its size in bytes                                                    */

    /* fa_combine: (num_parts, 3) in host memory: the elements from one batch item, head and query of a
     * part_lse to the next; any that stay inside 63 bits. NULL: all are contiguous. Not in version
     * 0.1, so size must be set                                                                       */
    const int64_t *part_lse_stride;

    /* Behind version 0.1, too. */
    int64_t attention_chunk; /* > 0: chunked attention (Llama 4), with FA_CAUSAL or without; 0: none. On
                              * CUDA in the kernels on FMA units alone                             */
    /* float32 (blocks, rows, Hkv, 1), the first three extents those of k (and v), or 1 where all share a
     * scale: an element of k, which must be float8_e4m3 or int8, stands for itself times the scale. So
     * there is one for the tensor, for each head, for each token and head, or what else the extents
     * say; fa_append writes them. In place of k_descale (v_descale). NULL: 1. On CUDA in fa_forward
     * and fa_decode                                                                                  */
    const fa_tensor *k_scale;
    const fa_tensor *v_scale;
    fa_precision precision; /* of float32 inputs                                                   */
    int32_t reserved_2;     /* 0                                                                   */
} fa_options;

/* For "fa_options options = FA_OPTIONS_INIT;" in C and in C++11 and later. */
#ifdef __cplusplus
static inline fa_options fa_options_init(void)
{
    fa_options options = fa_options();
    options.size = sizeof options;
    return options;
}
#define FA_OPTIONS_INIT fa_options_init()
#else
#define FA_OPTIONS_INIT {.size = sizeof(fa_options)}
#endif

/* ------------------------------------------------------------------------------------------------
 * 5. The calls
 *
 * Shapes: B = batch (num_sequences when packed), Hq and Hkv heads (Hq a multiple of Hkv), d the head
 * dim of q and k, from 1 to 576, d_v that of v and out, from 1 to 512. Latent attention (MLA) has 576 and
 * 512: its values are the first 512 columns of its keys, and v then is a tensor with k's data and strides.
 *     q   (B, n_q, Hq,  d)         packed: (1, total_q, Hq,  d)
 *     k   (B, n_k, Hkv, d)         packed: (1, total_k, Hkv, d)     paged: (pages, page_size, Hkv, d)
 *     v   (B, n_k, Hkv, d_v)       packed: (1, total_k, Hkv, d_v)   paged: (pages, page_size, Hkv, d_v)
 *     out (B, n_q, Hq,  d_v)       packed: (1, total_q, Hq,  d_v)
 *     lse (B, Hq, n_q)             packed: (Hq, total_q)            float32, contiguous
 * Types: q, k, v are float32, float16, bfloat16 or float8_e4m3, k and v also int8 (not in fa_weights on
 * CUDA); out and gradients are float32, float16 or bfloat16. They may differ from each other on the CPU.
 * Sums are kept in float32.
 * options may be NULL: the same as a zeroed struct.
 *
 * On CUDA all pointers except the structs themselves are device pointers; work is queued on
 * options->stream in the current context, nothing is synchronized or allocated, and the call can be
 * captured into a graph. On the CPU the call returns when the result is there; scratch memory is
 * allocated for the duration of the call.
 * ---------------------------------------------------------------------------------------------- */

/*
 * Forward: writes out, and lse unless it is NULL.
 * Algorithm: FlashAttention-2, section 3.1, algorithm 1 (arXiv:2307.08691). Few queries go to the
 * algorithm of fa_decode; fa_describe says which.
 */
FA_API fa_status fa_forward(const fa_tensor *q, const fa_tensor *k, const fa_tensor *v,
                            const fa_tensor *out, float *lse, const fa_options *options);

/* What fa_backward reads and writes besides the forward's own tensors. Members whose data is NULL are
 * absent: a gradient that is absent is not written. */
typedef struct fa_gradients {
    size_t size; /* sizeof(fa_gradients); 0 is read as the size in version 0.1 */

    fa_tensor dout;    /* in:  (B, n_q, Hq, d_v), the gradient of out                              */
    const float *dlse; /* in:  float32 like lse, the gradient of lse. NULL: zero                   */

    fa_tensor dq; /* out: shape of q                                                               */
    fa_tensor dk; /* out: shape of k; paged: of the pages, where a page that several sequences share
                   * gets the sum and an unused one gets 0                                         */
    fa_tensor dv; /* out: shape of v                                                               */

    fa_tensor dbias; /* out: (B or 1, Hq or 1, n_q or 1, n_k or 1): summed over the axes of extent 1.
                      * Needs options->bias. Any strides, no two elements at one address.          */
    float *dsinks;   /* out: float32 (Hq). Needs options->sinks                                    */
} fa_gradients;

#ifdef __cplusplus
static inline fa_gradients fa_gradients_init(void)
{
    fa_gradients gradients = fa_gradients();
    gradients.size = sizeof gradients;
    return gradients;
}
#define FA_GRADIENTS_INIT fa_gradients_init()
#else
#define FA_GRADIENTS_INIT {.size = sizeof(fa_gradients)}
#endif

/*
 * Backward: the gradients of a scalar loss, given those of out and lse. out and lse are those that
 * fa_forward returned for the same inputs and options (dropout: the same seed and offset).
 * Algorithm: FlashAttention-2, section 3.1.2, algorithm 2: the weights are recomputed from lse.
 * With dlse, rowsum(dout * out) becomes rowsum(dout * out) - dlse. Inputs of 8 bits: unsupported.
 * On a GPU dq, and a dbias that batch items or heads share, may differ in their last bits from run to
 * run, unless FA_DETERMINISTIC is set.
 */
FA_API fa_status fa_backward(const fa_tensor *q, const fa_tensor *k, const fa_tensor *v,
                             const fa_tensor *out, const float *lse, const fa_gradients *gradients,
                             const fa_options *options);

/*
 * Decode: one or a few new queries against a long key/value cache. The same function of the same
 * arguments as fa_forward; the keys are split into parts of a fixed length that are computed side by
 * side and merged by their log-sum-exp (Flash-Decoding, Dao et al. 2023), and each key and value is
 * read once for all the query heads that share it. Many queries (n_q * Hq/Hkv > 32) go to the
 * algorithm of fa_forward; fa_describe says which.
 */
FA_API fa_status fa_decode(const fa_tensor *q, const fa_tensor *k, const fa_tensor *v,
                           const fa_tensor *out, float *lse, const fa_options *options);

/* Bits of fa_append_options.flags. */
enum {
    FA_ROTARY_INTERLEAVED = 1 << 0, /* pairs are columns 2i and 2i+1; without it i and i + r/2    */
    FA_ROTARY_ONE_POSITION = 1 << 1, /* a sequence's queries all have the position of its first   */
    FA_WRITE_SCALES = 1 << 2 /* scales are found for each row and head, and written               */
};

/*
 * What fa_append does beside writing; in the style of fa_options. B: the batch, which is k_new.shape[0],
 * or num_sequences where k_new or q are packed. On CUDA all arrays lie in device memory, and the host
 * does not read them: lengths may be the device's alone, and a captured graph serves any.
 */
typedef struct fa_append_options {
    size_t size; /* sizeof(fa_append_options) */

    uint32_t flags;   /* FA_ROTARY_INTERLEAVED | ...                                               */
    fa_device device; /* where to compute                                                          */

    /* Number t of the new keys of sequence b goes to row left_padding[b] + lengths[b] + t of entry
     * cache_index[b] of the cache. */
    const int32_t *lengths;      /* (B): keys in the cache before the call. NULL: 0                */
    const int32_t *left_padding; /* (B): rows in front of the sequence's first key. NULL: 0        */
    const int32_t *cache_index;  /* (B): which entry of axis 0 of the cache, or row of the block
                                  * table, is the sequence's. NULL: entry b                        */

    int64_t num_sequences;         /* with cu_seqlens_new or cu_seqlens_q: how many; else 0        */
    const int32_t *cu_seqlens_new; /* (num_sequences + 1) of k_new and v_new. NULL: not packed     */
    const int32_t *cu_seqlens_q;   /* the same of q                                                */
    const int32_t *seqlens_new;    /* (B): how many of its rows count. NULL: all                   */
    const int32_t *seqlens_q;

    const int32_t *block_table; /* (block_table_rows, block_table_stride): page numbers, as in
                                 * fa_options. NULL: the cache is not paged                        */
    int64_t block_table_stride;
    int64_t block_table_rows; /* 0: B                                                              */

    /* Rotary embedding of r columns, rotary_offset .. rotary_offset + r - 1, of keys and queries: the
     * pair i of columns (x, y) becomes (x c - y s, y c + x s), with c and s in column i of row `position`
     * of the tables. Number t of the new keys, and of the queries, of sequence b has position
     * lengths[b] + t. */
    const fa_tensor *cos; /* (1, positions, 1, r/2), float32, float16 or bfloat16. NULL: none      */
    const fa_tensor *sin; /* the same                                                              */
    int64_t rotary_offset;
    const int32_t *rotary_positions; /* (B): in place of lengths. NULL: lengths                    */
    const fa_tensor *q;              /* queries to rotate. NULL: none                              */
    const fa_tensor *q_out;          /* where they go. NULL: they stay where they are              */

    /* float32 (blocks, rows, Hkv, 1), the first three extents those of the cache, or 1 where all share a
     * scale: an element of the cache, which must be float8_e4m3 or int8, stands for itself times the
     * scale. They are read; with FA_WRITE_SCALES, for which no extent may be 1 in place of another, each
     * row gets the scale that lets its largest element just fit. NULL: 1. */
    const fa_tensor *k_scale;
    const fa_tensor *v_scale;

    int32_t threads;  /* CPU: as in fa_options                                                     */
    int32_t reserved; /* 0                                                                         */
    void *stream;     /* CUDA: as in fa_options                                                    */

    /* (B), written: the keys that each sequence has in the cache after the call. That is lengths[b] and
     * the new ones, at most what a sequence has room for behind its padding; 0 where lengths[b] is
     * negative. The attention behind the call takes it as seqlens_k. NULL: none */
    int32_t *lengths_after;
} fa_append_options;

#ifdef __cplusplus
static inline fa_append_options fa_append_options_init(void)
{
    fa_append_options options = fa_append_options();
    options.size = sizeof options;
    return options;
}
#define FA_APPEND_OPTIONS_INIT fa_append_options_init()
#else
#define FA_APPEND_OPTIONS_INIT {.size = sizeof(fa_append_options)}
#endif

/*
 * Append: writes new keys and values into a cache, contiguous or paged, with rotary embedding of the
 * keys (and of queries) and conversion to the cache's type. On CUDA that is one launch.
 *   k_new, v_new      (B, n_new, Hkv, d or d_v), packed: (1, total_new, Hkv, d or d_v); float32, float16
 *                     or bfloat16
 *   k_cache, v_cache  (blocks, rows, Hkv, d or d_v), paged: (pages, page_size, Hkv, d or d_v); those
 *                     types, float8_e4m3 or int8
 *   options->q        (B, n_q, Hq, d), packed: (1, total_q, Hq, d); q_out the same
 * v_new and v_cache may be NULL, together: keys alone (latent attention, whose values are a part of its
 * keys). Elements are rotated in float32 and rounded once. In 8 bits what does not fit becomes the
 * largest number that does. NaN stays NaN in float8_e4m3 and becomes 0 in int8, but a written scale is
 * then NaN. A written scale is else the row's largest magnitude divided by 448 or 127.
 * Rows of the cache that no new key goes to are left as they are, and so are rows of q_out of no sequence.
 * Nothing is written outside of the cache: on the CPU a length, an index or a page that leads there is an
 * error; on CUDA that key is left out (also one whose page number is negative, and all of a sequence whose
 * length is), and a position outside of the rotary tables is taken as their first or last. FA_CHECK does not look at these arrays. Two sequences
 * must not write the same row.
 */
FA_API fa_status fa_append(const fa_tensor *k_new, const fa_tensor *v_new, const fa_tensor *k_cache,
                           const fa_tensor *v_cache, const fa_append_options *options);

/*
 * Combine: merges attention over disjoint sets of keys into attention over their union.
 *   parts      num_parts tensors of out's shape (B, n_q, Hq, d_v); float32, float16 or bfloat16
 *   part_lse   num_parts pointers to float32 (B, Hq, n_q), contiguous, or with the strides of
 *              options->part_lse_stride
 *   out, lse   as in fa_forward; lse may be NULL
 *       lse = log sum_p exp(part_lse_p),   out = sum_p exp(part_lse_p - lse) * parts_p
 * A part whose lse is -infinity is empty: its values are not read. If all parts are empty, out = 0 and
 * lse = -infinity. num_parts may be any number, 0 too. On CUDA a launch takes 448; between the launches
 * for more, sums are kept in out and lse if out is float32 and lse is wanted, else in
 * options->workspace: B * Hq * n_q * (d_v + 1) * 4 bytes. A sink belongs into exactly one of the parts.
 * Of the options, only size, device, threads, stream, workspace, workspace_size, part_lse_stride,
 * FA_DETERMINISTIC and FA_BATCH_INVARIANT may be set.
 */
FA_API fa_status fa_combine(const fa_tensor *parts, const float *const *part_lse, int64_t num_parts,
                            const fa_tensor *out, float *lse, const fa_options *options);

/*
 * Weights: the rows p_i of step 7 above (before dropout) for chosen queries.
 *   rows      int64 (num_rows): query positions in [0, n_q), the same ones for each batch item and
 *             head; NULL: all, and num_rows must then be n_q
 *   weights   (B, Hq, num_rows, n_k), float32, float16 or bfloat16, stride[3] = 1. With packed or
 *             padded lengths n_k is the longest; entries behind a sequence's own keys, and rows behind
 *             its own queries, are set to 0
 */
FA_API fa_status fa_weights(const fa_tensor *q, const fa_tensor *k, const int64_t *rows,
                            int64_t num_rows, const fa_tensor *weights, const fa_options *options);

/* ------------------------------------------------------------------------------------------------
 * 6. Asking first
 *
 * The same checks and the same planning as the calls themselves. Data pointers are not followed and
 * may be NULL (lengths and tables that lie in host memory are not read either); out may be NULL. For
 * FA_PASS_WEIGHTS v may be NULL.
 * ---------------------------------------------------------------------------------------------- */

typedef enum fa_pass {
    FA_PASS_FORWARD = 0,
    FA_PASS_BACKWARD = 1,
    FA_PASS_DECODE = 2,
    FA_PASS_WEIGHTS = 3
} fa_pass;

/* FA_OK if the call would run; else the status it would return, and fa_last_error() says why not. */
FA_API fa_status fa_supported(fa_pass pass, const fa_tensor *q, const fa_tensor *k,
                              const fa_tensor *v, const fa_tensor *out, const fa_options *options);

/* Writes one line that tells which kernel would run (without an lse) and why, for example
 *   "cpu forward avx512_bf16: bfloat16 dot products, query tile 192, key tile 256, 2 threads"
 * to text (at most size bytes with the final 0; cut if longer). */
FA_API fa_status fa_describe(fa_pass pass, const fa_tensor *q, const fa_tensor *k, const fa_tensor *v,
                             const fa_tensor *out, const fa_options *options, char *text, size_t size);

/* The bytes of device workspace that the call needs; 0 on the CPU, which allocates its own scratch. More
 * than that lets fa_backward compute a dbias on Hopper's tensor cores that has 16 bits and is summed over
 * the batch or over heads: 4 bytes for each of its elements, and 256. */
FA_API fa_status fa_workspace_size(fa_pass pass, const fa_tensor *q, const fa_tensor *k,
                                   const fa_tensor *v, const fa_tensor *out,
                                   const fa_options *options, size_t *bytes);

/* ------------------------------------------------------------------------------------------------
 * 7. Devices
 *
 * The CPU engine holds one source compiled for several instruction sets and picks the best one that
 * the processor has. The environment variable FA_CPU_ISA forces another ("portable", "avx2", "avx512",
 * "avx512_bf16", "amx"); a name that is unknown or that this processor cannot run makes every call on
 * the CPU fail with FA_ERROR_DEVICE and a sentence saying so. "amx" is "avx512_bf16" but for the
 * products of bfloat16 in a forward pass, which AMX does. Its first call asks Linux for AMX, for the
 * whole process: signal stacks (sigaltstack) then need room for AMX's registers,
 * sysconf(_SC_MINSIGSTKSZ) bytes, and if an earlier one is too small Linux refuses.
 *
 * On CUDA the fastest kernel that can do a problem on the device is chosen; fa_describe names it and
 * says why a faster one was passed over. The environment variable FA_CUDA_KERNEL, read once, allows one
 * family of forward kernels alone: "decode" (few queries, Ampere and later: keys are split over blocks),
 * "sm90" (Hopper's tensor cores and TMA), "sm80" (tensor cores of Ampere and later), "sm75" (of Turing:
 * float16 only), "tf32_sm90", "tf32" and "tf32x3" (float32 inputs, on tensor cores of Hopper, and of
 * Ampere and later), "f16x3_sm90" (float32 inputs with float32's errors, on tensor cores of Hopper),
 * "latent_sm90" (Hopper: values that are the first columns of keys, head dims of 257 to 576),
 * "decode_sm90" (Hopper: few queries by TMA), "mixed" (packed queries over a cache:
 * "decode" for sequences of few queries, another family for the others), "mixed_beside" (Hopper: both
 * at the same time; what it does not do, the others do)
 * or "simt" (float32 arithmetic, every GPU). What that family cannot do is then, but for "mixed_beside",
 * FA_ERROR_UNSUPPORTED, with a sentence naming the argument; a name that is unknown makes every such
 * call fail with FA_ERROR_DEVICE.
 * FA_CUDA_BACKWARD_KERNEL is the same for backward: "sm90", "sm80", "tf32" (float32 inputs of
 * FA_PRECISION_TF32), "tf32x3" (float32 inputs), "tf32x3_corrected" (the same with weights that add up
 * to 1 where scores are large) or "simt". With "sm90_persistent" or "sm90_joined"
 * (Hopper, no option of the scores) or "tf32_in_place" (Hopper, float32 inputs) the others do what
 * that family cannot do.
 *
 * The environment variable FA_CHECK, read once, is for finding mistakes: with FA_CHECK=1 a call on CUDA
 * that has lengths, a block table or rows first has a kernel look at them. If something is wrong the
 * call does nothing else and fails with FA_ERROR_ARGUMENT, in the words that the CPU has for it. The
 * call then waits for its stream once, and for the first call in a context 16 KiB of pinned memory are
 * allocated. In a stream that is being captured nothing waits: the check becomes a part of the graph,
 * and what a launch of the graph finds is the error of the next call on CUDA in that context, which
 * does nothing else.
 * ---------------------------------------------------------------------------------------------- */

typedef struct fa_cpu_info {
    char isa[32];       /* the instruction set in use                                             */
    char isas[128];     /* all that this build has and this processor runs, space-separated       */
    int32_t threads;    /* how many threads a call uses by default                                */
    int32_t vector_bits;
} fa_cpu_info;

/* Fails with FA_ERROR_DEVICE if FA_CPU_ISA asks for what this processor cannot run. */
FA_API fa_status fa_get_cpu_info(fa_cpu_info *info);

typedef struct fa_cuda_info {
    int32_t device_count;   /* CUDA devices that the driver reports                               */
    int32_t driver_version; /* for example 13000 for CUDA 13.0; 0: no driver                      */
    char detail[192];       /* a sentence: what was found, or why nothing was                     */
} fa_cuda_info;

/* Always succeeds: a machine without a GPU is no error. */
FA_API fa_status fa_get_cuda_info(fa_cuda_info *info);

#ifdef __cplusplus
}
#endif
#endif
