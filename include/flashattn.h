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
 *     fa_last_error() then returns a sentence with the argument, its value and what was expected.
 *     After an error, outputs hold unspecified values, and nothing else has changed.
 *   - Thread safety: every function may be called from any number of threads at once, also from
 *     inside OpenMP regions, as long as no two calls write the same memory. Each thread has its own
 *     fa_last_error().
 *   - Processes: calls on the CPU work in the child of a fork, with any number of threads, whatever
 *     the parent's threads were doing. (CUDA itself does not work in the child of a process that has
 *     used it.) Once loaded, a shared library is never unloaded: dlclose leaves it in memory, because
 *     its threads run its code.
 *   - Aliasing: outputs must not overlap inputs or each other. Inputs may overlap each other.
 *   - Alignment: data pointers must be aligned to the size of their elements.
 *   - Sizes and strides are 64-bit and count elements, never bytes. Tensors may hold more than 2^31
 *     elements.
 *   - Inputs that no query may see (padding after a sequence's end, unused pages, masked keys)
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

/* The only definition of the version; the build reads it. */
#define FA_VERSION_MAJOR 0
#define FA_VERSION_MINOR 1
#define FA_VERSION_PATCH 0

/* The version of the loaded library: major * 10000 + minor * 100 + patch. */
FA_API int fa_version(void);

/* The same as text, for example "0.1.0". */
FA_API const char *fa_version_string(void);

/* ------------------------------------------------------------------------------------------------
 * 2. Status and errors
 * ---------------------------------------------------------------------------------------------- */

/* These values never change their meaning. */
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

/* The error of this thread's latest call that failed; "" if none has failed. The text stays valid
 * until this thread's next failing call. Never NULL. */
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
    FA_INT8 = 5         /* -127 to 127, times a scale; caches of keys and values only             */
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
 * gradients stride[3] must be 1 (if shape[3] > 1); bias and mask may have any strides. In an output
 * no two elements may share an address. data may be NULL if an extent is 0.
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

/* How exactly float32 inputs are multiplied. This has an effect only if q, k and v are float32. A
 * backend may always be more exact than requested: the CPU always computes in float32, and so does
 * CUDA where it has no kernels with fewer bits (fa_weights, backward of head dims above 256 with less
 * shared memory than Hopper has, older devices). fa_describe tells what a call does. All sums are
 * float32. */
typedef enum fa_precision {
    FA_PRECISION_FLOAT32 = 0, /* errors of float32's size, by the fastest products                */
    FA_PRECISION_TF32 = 1,    /* operands of products, including weights, may be rounded to 11 bits
                               * on tensor cores: to tf32, or to float16 times a power of two for
                               * each row, tile or head                                           */
    FA_PRECISION_IEEE = 2     /* products and sums in IEEE 754's float32 arithmetic               */
} fa_precision;

/* Bits of fa_options.flags. */
enum {
    FA_CAUSAL = 1 << 0,        /* query i sees only keys j <= i + diagonal                        */
    FA_DIAGONAL = 1 << 1,      /* use the field diagonal; without it diagonal = n_k - n_q         */
    FA_WINDOW = 1 << 2,        /* use the fields window_left and window_right                     */
    FA_SCALE = 1 << 3,         /* use the field scale even if it is 0                             */
    FA_DETERMINISTIC = 1 << 4, /* the same bits from run to run, also in backward (always on CPU) */
    FA_BATCH_INVARIANT = 1 << 5, /* a sequence's bits do not depend on the rest of the batch
                                   (always on the CPU)                                            */
    FA_FULL_WORKSPACE = 1 << 6  /* CUDA: fail with FA_ERROR_WORKSPACE instead of running a slower
                                   kernel because the workspace is too small                      */
};

/*
 * What the options mean. This is the same on every backend. For batch item b with lengths n_q and n_k,
 * query head h (which reads key/value head h / (Hq/Hkv)), query i in [0, n_q) and key j in [0, n_k):
 *
 *   1. x = scale * (q_i . k_j)
 *   2. x = softcap * tanh(x / softcap)                     if softcap > 0
 *   3. x = x - slope_h * |i + diagonal - j|                if alibi_slopes
 *   4. x = x + bias[b, h, i, j]                            if bias
 *   5. x = -infinity unless query i may see key j. It may if all of these that are set allow it:
 *        FA_CAUSAL:  j <= i + diagonal
 *        FA_WINDOW:  i + diagonal - window_left <= j <= i + diagonal + window_right  (-1: no limit)
 *        attention_chunk c > 0:  floor(j / c) = floor((i + diagonal) / c): key and query are in the
 *                    same chunk of c positions
 *        mask:       mask[b, h, i, j] != 0
 *   6. lse_i = log( sum_j exp(x_ij) + exp(sink_h) )        natural logarithm; the sink's term if sinks
 *   7. p_ij  = exp(x_ij - lse_i)
 *   8. p_ij  = keep_ij ? p_ij / (1 - dropout_p) : 0        if dropout_p > 0; lse does not change
 *   9. out_i = sum_j p_ij v_j
 *
 * diagonal is n_k - n_q unless FA_DIAGONAL is set: the masks are aligned to the bottom right, so that
 * the last query sees the last key, as in FlashAttention 2.1 and later. It is computed for each batch
 * item from the lengths of that item.
 *
 * A query that sees no key gives out = 0 and lse = -infinity (with a sink: out = 0, lse = sink), and
 * its gradients are exactly 0. A sequence of length 0 is legal. A logit of +infinity or NaN makes only
 * its own row NaN.
 *
 * dropout: keep_ij = (r >= t), t = min(round(65536 * dropout_p), 65535) (t = 0: no dropout), where r is
 * the 16-bit half (2*((j>>3)&3) + (j&1)) (little endian) of the 128-bit block
 * Philox-4x32-7(counter, key) (Salmon et al., SC 2011), with
 *   counter = { 4*(j>>5) + ((j>>1)&3), i, b*Hq + h + hi(offset), lo(offset) },
 *   key     = { lo(seed), hi(seed) },
 * where lo and hi are the 32-bit halves and all sums are modulo 2^32. Every backend uses these bits, in
 * forward and backward.
 *
 * Lengths. There are three ways to give them, separately for the queries and for the keys and values:
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
 * seqlens_k is then required, and table entries after a sequence's last page are not read.
 *
 * On the CPU, wrong lengths, cumulative lengths, table entries and rows of fa_weights are an error that
 * names the array, the index and the value. On CUDA they lie in device memory, which the host does not
 * read. Kernels clamp a length to the range from 0 to what the tensor or the block table has room for,
 * and a page number that is not in the cache stands for another page or for zeros, so that reads and
 * writes stay inside. max_seqlen_q and max_seqlen_k are trusted: query rows beyond max_seqlen_q may be left
 * unwritten. FA_CHECK=1 (section 7) finds wrong values on CUDA as well.
 */
typedef struct fa_options {
    /* sizeof(fa_options) as compiled by the caller; 0 means the size in version 0.1. Fields beyond
     * that size count as 0. A zeroed struct means plain softmax(Q K^T / sqrt(d)) V. */
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
    const fa_tensor *mask; /* the same shape, FA_BOOL; true: the query may see the key. NULL: none */

    const float *alibi_slopes;  /* float32 (Hq), or (batch, Hq) with a stride. NULL: none          */
    int64_t alibi_batch_stride; /* elements from one batch item's slopes to the next; 0: shared    */
    const float *sinks;         /* float32 (Hq): a logit without a value. NULL: none               */

    float dropout_p;               /* 0 <= p < 1                                                   */
    uint64_t dropout_seed;
    uint64_t dropout_offset;
    const uint64_t *dropout_state; /* {seed, offset} in the memory of the device, read when the kernel
                                    * runs; replaces the two fields above. For CUDA graphs          */

    int64_t num_sequences;       /* with cu_seqlens: the number of sequences; else 0               */
    const int32_t *cu_seqlens_q; /* (num_sequences + 1). NULL: not packed                          */
    const int32_t *cu_seqlens_k;
    const int32_t *seqlens_q;    /* (batch). NULL: all rows are used                               */
    const int32_t *seqlens_k;
    int64_t max_seqlen_q; /* with cu_seqlens: a bound of the lengths, which the host does not read */
    int64_t max_seqlen_k; /* on CUDA; 0: unknown. On the CPU a bound that is too small is an error */

    const int32_t *block_table; /* (batch, block_table_stride): page numbers. NULL: not paged      */
    int64_t block_table_stride; /* table entries per batch item                                    */

    const float *q_descale; /* float32 (batch, Hkv): an 8-bit input means data * descale. NULL: 1  */
    const float *k_descale;
    const float *v_descale;

    int32_t threads; /* CPU: the largest number of threads; 0: OpenMP's choice (one without OpenMP, or
                      * inside a parallel region), fewer for tiny problems. Fewer are used if there is
                      * less to do or if threads cannot be started; never more than 1024. The number
                      * does not change any bit of a result                                        */
    int32_t reserved; /* 0 */

    void *stream;          /* CUDA: the CUstream (cudaStream_t) to work on; NULL: the default one  */
    void *workspace;       /* CUDA: fa_workspace_size() bytes of device memory, aligned to 256     */
    size_t workspace_size; /* its size in bytes                                                    */

    /* fa_combine: (num_parts, 3) in host memory: for each part_lse, the strides of batch item, head and
     * query in elements; offsets must fit into 63 bits. NULL: all are contiguous. Not in version 0.1,
     * so size must be set                                                                            */
    const int64_t *part_lse_stride;

    /* The following fields are not in version 0.1 either. */
    int64_t attention_chunk; /* > 0: chunked attention (Llama 4), with FA_CAUSAL or without; 0: none. On
                              * CUDA only the kernels on FMA units support it                      */
    /* float32 (blocks, rows, Hkv, 1). Each of the first three extents is that of k (and v), or 1 if all
     * share a scale: for example one scale for the tensor, for each head, or for each token and head.
     * An element of k, which must be float8_e4m3 or int8, means its value times the scale. fa_append
     * writes scales. They replace k_descale (v_descale). NULL: 1. On CUDA in fa_forward and fa_decode  */
    const fa_tensor *k_scale;
    const fa_tensor *v_scale;
    fa_precision precision; /* for float32 inputs                                                  */
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
 * dim of q and k, from 1 to 576, d_v the head dim of v and out, from 1 to 512. In latent attention (MLA)
 * they are 576 and 512: the values are the first 512 columns of the keys, and v is a tensor with k's data
 * and strides. On CUDA, fa_backward takes d to 512.
 *     q   (B, n_q, Hq,  d)         packed: (1, total_q, Hq,  d)
 *     k   (B, n_k, Hkv, d)         packed: (1, total_k, Hkv, d)     paged: (pages, page_size, Hkv, d)
 *     v   (B, n_k, Hkv, d_v)       packed: (1, total_k, Hkv, d_v)   paged: (pages, page_size, Hkv, d_v)
 *     out (B, n_q, Hq,  d_v)       packed: (1, total_q, Hq,  d_v)
 *     lse (B, Hq, n_q)             packed: (Hq, total_q)            float32, contiguous
 * Types: q, k, v are float32, float16, bfloat16 or float8_e4m3, k and v also int8 (not in fa_weights on
 * CUDA); out and gradients are float32, float16 or bfloat16. They may differ from each other on the CPU.
 * Sums are kept in float32.
 * options may be NULL, which means the same as a zeroed struct.
 *
 * On CUDA all pointers except the structs themselves are device pointers. The call queues its work on
 * options->stream in the current context, synchronizes and allocates nothing, and can be captured into
 * a graph. On the CPU the call returns when the result is complete; scratch memory is allocated for the
 * duration of the call.
 * ---------------------------------------------------------------------------------------------- */

/*
 * Forward: writes out, and lse unless it is NULL.
 * Algorithm: FlashAttention-2, section 3.1, algorithm 1 (arXiv:2307.08691). With few queries it is the
 * algorithm of fa_decode; fa_describe tells which.
 */
FA_API fa_status fa_forward(const fa_tensor *q, const fa_tensor *k, const fa_tensor *v,
                            const fa_tensor *out, float *lse, const fa_options *options);

/* What fa_backward reads and writes in addition to the tensors of forward. Members whose data is NULL
 * are absent: an absent gradient is not written. */
typedef struct fa_gradients {
    size_t size; /* sizeof(fa_gradients); 0 means the size in version 0.1 */

    fa_tensor dout;    /* in:  (B, n_q, Hq, d_v), the gradient of out                              */
    const float *dlse; /* in:  float32 like lse, the gradient of lse. NULL: zero                   */

    fa_tensor dq; /* out: shape of q                                                               */
    fa_tensor dk; /* out: shape of k. Paged: a page that several sequences share gets the sum of their
                   * gradients, and an unused page gets 0                                          */
    fa_tensor dv; /* out: shape of v                                                               */

    fa_tensor dbias; /* out: (B or 1, Hq or 1, n_q or 1, n_k or 1): summed over the axes of extent 1.
                      * Needs options->bias. Any strides; no two elements may share an address     */
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
 * Backward: the gradients of a scalar loss, given its gradients of out and lse. out and lse must be the
 * results of fa_forward for the same inputs and options (dropout: the same seed and offset).
 * Algorithm: FlashAttention-2, section 3.1.2, algorithm 2: the weights are recomputed from lse.
 * With dlse, rowsum(dout * out) becomes rowsum(dout * out) - dlse. Inputs of 8 bits: unsupported.
 * On a GPU dq, and a dbias that batch items or heads share, may differ in their last bits from run to
 * run, unless FA_DETERMINISTIC is set.
 */
FA_API fa_status fa_backward(const fa_tensor *q, const fa_tensor *k, const fa_tensor *v,
                             const fa_tensor *out, const float *lse, const fa_gradients *gradients,
                             const fa_options *options);

/*
 * Decode: one or a few new queries against a long key/value cache. Arguments and results are those of
 * fa_forward. The keys are split into parts, which are computed in parallel and merged by their
 * log-sum-exp (Flash-Decoding, Dao et al. 2023), and each key and value is read once for all the query
 * heads that share it. With many queries (on the CPU n_q * Hq/Hkv > 32) it is the algorithm of
 * fa_forward; fa_describe tells which.
 */
FA_API fa_status fa_decode(const fa_tensor *q, const fa_tensor *k, const fa_tensor *v,
                           const fa_tensor *out, float *lse, const fa_options *options);

/* Bits of fa_append_options.flags. */
enum {
    FA_ROTARY_INTERLEAVED = 1 << 0, /* pairs are columns 2i and 2i+1; without it i and i + r/2    */
    FA_ROTARY_ONE_POSITION = 1 << 1, /* all queries of a sequence have the position of the first  */
    FA_WRITE_SCALES = 1 << 2,       /* compute and write the scale of each row and head           */
    FA_LENGTHS_WITH_PADDING = 1 << 3 /* lengths count the rows of left_padding, too               */
};

/*
 * The options of fa_append, in the style of fa_options. B is the batch: k_new.shape[0], or num_sequences
 * if k_new or q are packed. On CUDA all arrays lie in device memory and the host does not read them, so
 * a captured graph works for any lengths.
 */
typedef struct fa_append_options {
    size_t size; /* sizeof(fa_append_options) */

    uint32_t flags;   /* FA_ROTARY_INTERLEAVED | ...                                               */
    fa_device device; /* where to compute                                                          */

    /* New key t of sequence b is written to row left_padding[b] + lengths[b] + t of entry
     * cache_index[b] of the cache; with FA_LENGTHS_WITH_PADDING to row lengths[b] + t. */
    const int32_t *lengths;      /* (B): keys in the cache before the call. NULL: 0                */
    const int32_t *left_padding; /* (B): rows before the sequence's first key. NULL: 0             */
    const int32_t *cache_index;  /* (B): the sequence's entry of axis 0 of the cache, or its row of the
                                  * block table. NULL: entry b                                     */

    int64_t num_sequences;         /* with cu_seqlens_new or cu_seqlens_q: their number; else 0    */
    const int32_t *cu_seqlens_new; /* (num_sequences + 1) for k_new and v_new. NULL: not packed    */
    const int32_t *cu_seqlens_q;   /* the same for q                                               */
    const int32_t *seqlens_new;    /* (B): how many of a sequence's rows are used. NULL: all       */
    const int32_t *seqlens_q;

    const int32_t *block_table; /* (block_table_rows, block_table_stride): page numbers, as in
                                 * fa_options. NULL: the cache is not paged                        */
    int64_t block_table_stride;
    int64_t block_table_rows; /* 0: B                                                              */

    /* Rotary embedding of r columns, rotary_offset .. rotary_offset + r - 1, of keys and queries: column
     * pair i, (x, y), becomes (x c - y s, y c + x s), where c and s are column i of row `position` of
     * the tables. New key t of sequence b has position lengths[b] + t, and so has query t. */
    const fa_tensor *cos; /* (1, positions, 1, r/2), float32, float16 or bfloat16. NULL: none      */
    const fa_tensor *sin; /* the same                                                              */
    int64_t rotary_offset;
    const int32_t *rotary_positions; /* (B): replaces lengths as the first position. NULL: lengths */
    const fa_tensor *q;              /* queries to rotate. NULL: none                              */
    const fa_tensor *q_out;          /* the rotated queries. NULL: q is overwritten                */

    /* float32 (blocks, rows, Hkv, 1). Each of the first three extents is that of the cache, or 1 if all
     * share a scale. An element of the cache, which must be float8_e4m3 or int8, means its value times
     * the scale. Scales are read, unless FA_WRITE_SCALES is set: then all three extents must be those of
     * the cache, and each new row gets the scale with which its largest element just fits. NULL: 1. */
    const fa_tensor *k_scale;
    const fa_tensor *v_scale;

    int32_t threads;  /* CPU: as in fa_options                                                     */
    int32_t reserved; /* 0                                                                         */
    void *stream;     /* CUDA: as in fa_options                                                    */

    /* (B), written: the number of keys of each sequence in the cache after the call, without padding.
     * This is lengths[b] plus the number of new keys (with FA_LENGTHS_WITH_PADDING minus
     * left_padding[b]), at most what the cache has room for after the padding, and 0 if lengths[b] is
     * negative. Attention after this call can take it as seqlens_k. NULL: none */
    int32_t *lengths_after;

    /* (B, block_table_stride), written: the row of block_table that each sequence has. On CUDA a wrong
     * cache_index[b] gives the nearest row. Attention after this call can take it as block_table. NULL:
     * none */
    int32_t *block_table_after;

    /* Written, for attention that does not see the padding. Both arrays number the rows of the cache:
     * row i of block b (of entry b of axis 0) has the number b * r + i. Blocks of k_cache and of v_cache
     * must be the same number r of rows apart, stride[0] = r * stride[1] (r = 1 if blocks have one row),
     * and there must be fewer than 2^31 numbers. On CUDA a wrong left_padding[b], cache_index[b] or page
     * number gives the nearest right one. NULL: none
     *
     * row_table_after: (B, rows of a sequence), where these are k_cache.shape[1], paged: times
     * block_table_stride. Entry j is the number of the row that has key j; entries after the last key
     * are not written. Attention after this call can take it as block_table, with the cache as pages of
     * one row: shape (rows, 1, Hkv, d), stride[0] = the cache's stride[1] (of blocks of one row
     * stride[0]).
     *
     * cu_seqlens_after: (B + 1), not with block_table or cache_index. The number of the first key of each
     * sequence, and of the row after the last sequence. Attention after this call can take it as
     * cu_seqlens_k, with the cache as packed sequences: shape (1, rows, Hkv, d), stride[1] as above. */
    int32_t *row_table_after;
    int32_t *cu_seqlens_after;
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
 * v_new and v_cache may both be NULL: then only keys are written (latent attention, whose values are a
 * part of its keys). Without rows in k_new the cache is not written: the call rotates queries, and writes
 * lengths and tables for the attention after it. Elements are rotated in float32 and rounded once. In 8
 * bits, numbers that are too large are clamped to the largest number. NaN stays NaN in float8_e4m3 and
 * becomes 0 in int8, but a written scale is then NaN. Any other written scale is the row's largest
 * magnitude divided by 448 (float8_e4m3) or 127 (int8).
 * Rows of the cache that get no new key do not change, and neither do rows of q_out of no sequence.
 * Nothing is written outside of the cache. On the CPU a length, an index or a page number outside of it
 * is an error. On CUDA such a key is not written, nor is any key of a sequence with a negative length,
 * and positions are clamped to the rotary tables. FA_CHECK does not check these arrays. Two sequences
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
 * lse = -infinity. num_parts may be any number, including 0. On CUDA a launch merges up to 448 parts.
 * For more parts there are several launches. Between them, sums are kept in out and lse if out is
 * float32 and lse is not NULL, else in options->workspace: B * Hq * n_q * (d_v + 1) * 4 bytes. A sink
 * must be included in exactly one of the parts. Of the options, only size, device, threads, stream,
 * workspace, workspace_size, part_lse_stride, FA_DETERMINISTIC and FA_BATCH_INVARIANT may be set.
 */
FA_API fa_status fa_combine(const fa_tensor *parts, const float *const *part_lse, int64_t num_parts,
                            const fa_tensor *out, float *lse, const fa_options *options);

/*
 * Weights: the rows p_i of step 7 above (before dropout) for chosen queries.
 *   rows      int64 (num_rows): query positions in [0, n_q), the same for each batch item and head;
 *             NULL: all, and num_rows must then be n_q
 *   weights   (B, Hq, num_rows, n_k), float32, float16 or bfloat16, stride[3] = 1. With packed or
 *             padded lengths n_k is the longest length; entries after a sequence's keys, and rows after
 *             its queries, are set to 0
 */
FA_API fa_status fa_weights(const fa_tensor *q, const fa_tensor *k, const int64_t *rows,
                            int64_t num_rows, const fa_tensor *weights, const fa_options *options);

/* ------------------------------------------------------------------------------------------------
 * 6. Asking first
 *
 * These functions do the same checks and the same planning as the calls. Data pointers are not followed
 * and may be NULL (lengths and tables in host memory are not read either); out may be NULL. For
 * FA_PASS_WEIGHTS v may be NULL.
 * ---------------------------------------------------------------------------------------------- */

typedef enum fa_pass {
    FA_PASS_FORWARD = 0,
    FA_PASS_BACKWARD = 1,
    FA_PASS_DECODE = 2,
    FA_PASS_WEIGHTS = 3
} fa_pass;

/* FA_OK if the call would run; else the status that it would return, and fa_last_error() tells why. */
FA_API fa_status fa_supported(fa_pass pass, const fa_tensor *q, const fa_tensor *k,
                              const fa_tensor *v, const fa_tensor *out, const fa_options *options);

/* Writes one line to text that tells which kernel would run (without an lse) and why, for example
 *   "cpu forward avx512_bf16: bfloat16 dot products, query tile 192, key tile 256, 2 threads"
 * A line that is longer than size bytes, including the final 0, is cut. */
FA_API fa_status fa_describe(fa_pass pass, const fa_tensor *q, const fa_tensor *k, const fa_tensor *v,
                             const fa_tensor *out, const fa_options *options, char *text, size_t size);

/* The bytes of device workspace that the call needs; 0 on the CPU, which allocates its own scratch
 * memory. Where fa_forward splits keys on Hopper, so that few heads or queries keep the device busy, or
 * rounds float32 inputs of FA_PRECISION_TF32 first, a call with less runs without that, unless
 * FA_FULL_WORKSPACE is set; fa_describe tells what runs with all of it. With 4 more bytes for each element of dbias, and 256, fa_backward can use Hopper's tensor
 * cores for a 16-bit dbias that is summed over the batch or over heads. */
FA_API fa_status fa_workspace_size(fa_pass pass, const fa_tensor *q, const fa_tensor *k,
                                   const fa_tensor *v, const fa_tensor *out,
                                   const fa_options *options, size_t *bytes);

/* ------------------------------------------------------------------------------------------------
 * 7. Devices
 *
 * The CPU engine is one source that is compiled for several instruction sets. The library uses the best
 * one that the processor has. The environment variable FA_CPU_ISA forces another one ("portable",
 * "avx2", "avx512", "avx512_bf16", "amx"). If the name is unknown or the processor cannot run it, every
 * call on the CPU fails with FA_ERROR_DEVICE. "amx" is "avx512_bf16", except that AMX computes the
 * products of bfloat16 in forward. Its first call asks Linux for AMX, for the whole process: signal
 * stacks (sigaltstack) then need sysconf(_SC_MINSIGSTKSZ) bytes, with room for AMX's registers. Linux
 * refuses if an existing signal stack is too small.
 *
 * On CUDA the library chooses the fastest kernel that can run the problem on the device; fa_describe
 * names it and tells why a faster one was not chosen. The environment variable FA_CUDA_KERNEL, read
 * once, allows only one family of forward kernels:
 *   "decode"        few queries, Ampere and later: keys are split over blocks
 *   "decode_sm90"   the same on Hopper, by TMA or, from small pages, by threads
 *   "latent_sm90"   Hopper: values that are the first columns of keys, head dims of 257 to 576
 *   "sm90"          tensor cores and TMA of Hopper
 *   "sm90_split"    the same with keys split over blocks; other families run what this one cannot
 *   "sm80"          tensor cores of Ampere and later; with keys split over blocks where that is faster
 *   "sm80_split"    the same with keys split over blocks; other families run what this one cannot
 *   "sm75"          tensor cores of Turing: float16 only
 *   "tf32_rounded"  float32 inputs rounded to float16 times a power of two for each head, Hopper; other
 *                   families run what this one cannot
 *   "tf32_sm90"     float32 inputs in tf32 (in float16 above head dim 256), Hopper
 *   "tf32_split"    the same with keys split over blocks; other families run what this one cannot
 *   "tf32"          the same, tensor cores of Ampere and later
 *   "f16x3_sm90"    float32 inputs with errors of float32's size, tensor cores of Hopper
 *   "f16x3_split"   the same with keys split over blocks; other families run what this one cannot
 *   "tf32x3"        the same, tensor cores of Ampere and later
 *   "mixed"         packed queries over a cache: "decode" for sequences of few queries, another family
 *                   for the others
 *   "mixed_beside"  Hopper: both at the same time; other families run what this one cannot
 *   "simt"          float32 arithmetic, every GPU
 * Problems that the family cannot run fail with FA_ERROR_UNSUPPORTED and a sentence that names the
 * argument (except with "mixed_beside" and the names that end in "_split"). With an unknown name every such call fails with
 * FA_ERROR_DEVICE. FA_CUDA_BACKWARD_KERNEL is the same for backward: "sm90", "sm80", "tf32" (float32
 * inputs of FA_PRECISION_TF32), "tf32x3" (float32 inputs), "tf32x3_corrected" (the same with weights
 * that add up to 1 even if scores are large) or "simt". With "sm90_persistent", "sm90_joined",
 * "sm90_single", "sm90_chained", "sm90_rounding" (Hopper, no option of the scores) or "tf32_in_place"
 * (Hopper, float32 inputs), other families run what that family cannot.
 *
 * The environment variable FA_CHECK, read once, is for debugging. With FA_CHECK=1 a call on CUDA that
 * has lengths, a block table or rows first checks them with a kernel. If a value is wrong, the call does
 * nothing else and fails with FA_ERROR_ARGUMENT and the CPU's error message. Each call then waits for
 * its stream once, and the first call in a context allocates 16 KiB of pinned memory. In a stream that
 * is being captured nothing waits: the check becomes a part of the graph. If a launch of the graph finds
 * a wrong value, the next call on CUDA in that context fails with this error and does nothing else.
 * ---------------------------------------------------------------------------------------------- */

typedef struct fa_cpu_info {
    char isa[32];       /* the instruction set in use                                             */
    char isas[128];     /* all that this build has and this processor supports, space-separated   */
    int32_t threads;    /* the number of threads that a call uses by default                      */
    int32_t vector_bits;
} fa_cpu_info;

/* Fails with FA_ERROR_DEVICE if FA_CPU_ISA names an instruction set that the processor lacks. */
FA_API fa_status fa_get_cpu_info(fa_cpu_info *info);

typedef struct fa_cuda_info {
    int32_t device_count;   /* CUDA devices that the driver reports                               */
    int32_t driver_version; /* for example 13000 for CUDA 13.0; 0: no driver                      */
    char detail[192];       /* a sentence: what was found, or why nothing was                     */
} fa_cuda_info;

/* Always succeeds: a machine without a GPU is not an error. */
FA_API fa_status fa_get_cuda_info(fa_cuda_info *info);

#ifdef __cplusplus
}
#endif
#endif
