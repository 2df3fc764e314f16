/*
 * The library's compiled kernels: the one table from which the build, the planner and the kernels' constants come.
 *
 *     VARIANT(name, .field = value, ...)                       one kernel
 *     VARIANT_16BIT(name, ...)                                 two: name_f16 and name_bf16, of that element type
 *     VARIANT_16BIT_SUFFIX(name, suffix, ...)                  two: name_f16<suffix> and name_bf16<suffix>
 *     FAMILY(pass, name) ... END(pass, name)                   the rows among which one planner chooses, in the order
 *                                                              in which it tries them: the first that fits is taken
 *
 * The build (cmake/Cuda.cmake) reads the rows as text and compiles kernels/<file>.cu for each, with -D<FIELD>=<value>
 * for each field that is no string. The host includes this file in src/cuda/variants.h, where a row's id is
 * FA_VARIANT_<name>, and in src/cuda/variants.c, which has the rows as structs. A value is a number or a name that the
 * kernel and the host know, without commas and parentheses.
 *
 *   file, kernel      the source, and the name of the kernel in it
 *   architecture      the oldest one that it runs on. 75: any; its PTX is that of compute_75. 80: the same from
 *                     compute_80 on. 90: sm_90a alone, which has no PTX
 *   each_architecture 1: the source is read anew for each architecture, so that __CUDA_ARCH__ tells them apart.
 *                     Otherwise it is read once, as of the oldest one
 *   element           of the operands of products (common/element.h). Kernels on FMA units multiply in float32,
 *                     whatever type they load
 *   cache             of keys and values in memory, where that is another one
 *   head_dim          the widest head dim of queries and keys, or, without value_dim, of values as well
 *   value_dim         the widest head dim of values that a block computes: of all of them, but for a cluster's share
 *   columns           of head_dim, that products take: those behind are 0; 0: all
 *   options           bits of the options that change scores or weights. All of them: each may be there or not.
 *                     One: it is there, alone. 0: masks by position and lengths alone
 *   keys              of a key tile
 *   stages, q_stages  buffers of the pipeline in shared memory, for keys and for values; for queries
 *   ordered           1: for sums in one order, where FA_DETERMINISTIC or FA_BATCH_INVARIANT asks for it, or where
 *                     that is faster
 *   static_smem       bytes of shared memory beside the dynamic ones, at most; 0: FA_CUDA_STATIC_SMEM (src/cuda/family.h)
 *   max_parts         of a launch of combine
 * The others are explained by the header of their family, kernels/<folder>/<folder>.h, which also has the formulas
 * of the numbers that follow from them (queries, threads, shared memory).
 */

#define VARIANT_16BIT(name, ...) VARIANT_16BIT_SUFFIX(name, , __VA_ARGS__)
#define VARIANT_16BIT_SUFFIX(name, suffix, ...)                                                    \
    VARIANT(name##_f16##suffix, .element = FA_ELEMENT_FLOAT16, __VA_ARGS__)                        \
    VARIANT(name##_bf16##suffix, .element = FA_ELEMENT_BFLOAT16, __VA_ARGS__)

FAMILY(forward, sm90)
/* Where no row has more than 128 keys. */
VARIANT_16BIT(forward_sm90_d64_one, .file = "forward_sm90/forward_sm90", .kernel = "forward_sm90",
              .architecture = 90, .head_dim = 64, .value_dim = 64, .options = 0, .cluster = 1,
              .consumers = 2, .keys = 128, .stages = 4, .q_stages = 4, .single_tiles = 1,
              .short_rows = 0, .tracked = 0)
/* For rows of few keys. */
VARIANT_16BIT(forward_sm90_d64_tracked, .file = "forward_sm90/forward_sm90",
              .kernel = "forward_sm90", .architecture = 90, .head_dim = 64, .value_dim = 64,
              .options = 0, .cluster = 1, .consumers = 2, .keys = 128, .stages = 4, .q_stages = 4,
              .single_tiles = 0, .short_rows = 1, .few_queries = 1, .tracked = 1)
/* For few queries, and those whose last 192 would be few. */
VARIANT_16BIT(forward_sm90_d64_two, .file = "forward_sm90/forward_sm90", .kernel = "forward_sm90",
              .architecture = 90, .head_dim = 64, .value_dim = 64, .options = 0, .cluster = 1,
              .consumers = 2, .keys = 128, .stages = 4, .q_stages = 4, .single_tiles = 0,
              .short_rows = 0, .few_queries = 1, .tracked = 0)
VARIANT_16BIT(forward_sm90_d64, .file = "forward_sm90/forward_sm90", .kernel = "forward_sm90",
              .architecture = 90, .head_dim = 64, .value_dim = 64, .options = 0, .cluster = 1,
              .consumers = 3, .keys = 128, .stages = 4, .q_stages = 2, .single_tiles = 0,
              .short_rows = 0, .tracked = 0)
VARIANT_16BIT(forward_sm90_d80_two, .file = "forward_sm90/forward_sm90", .kernel = "forward_sm90",
              .architecture = 90, .head_dim = 80, .value_dim = 80, .options = 0, .cluster = 1,
              .consumers = 2, .keys = 128, .stages = 2, .q_stages = 2, .single_tiles = 0,
              .short_rows = 0, .few_queries = 1, .tracked = 0)
VARIANT_16BIT(forward_sm90_d80, .file = "forward_sm90/forward_sm90", .kernel = "forward_sm90",
              .architecture = 90, .head_dim = 80, .value_dim = 80, .options = 0, .cluster = 1,
              .consumers = 3, .keys = 96, .stages = 3, .q_stages = 1, .single_tiles = 0,
              .short_rows = 0, .tracked = 0)
VARIANT_16BIT(forward_sm90_d96_two, .file = "forward_sm90/forward_sm90", .kernel = "forward_sm90",
              .architecture = 90, .head_dim = 96, .value_dim = 96, .options = 0, .cluster = 1,
              .consumers = 2, .keys = 128, .stages = 2, .q_stages = 2, .single_tiles = 0,
              .short_rows = 0, .few_queries = 1, .tracked = 0)
VARIANT_16BIT(forward_sm90_d96, .file = "forward_sm90/forward_sm90", .kernel = "forward_sm90",
              .architecture = 90, .head_dim = 96, .value_dim = 96, .options = 0, .cluster = 1,
              .consumers = 3, .keys = 80, .stages = 3, .q_stages = 1, .single_tiles = 0,
              .short_rows = 0, .tracked = 0)
VARIANT_16BIT(forward_sm90_d128_tracked, .file = "forward_sm90/forward_sm90",
              .kernel = "forward_sm90", .architecture = 90, .head_dim = 128, .value_dim = 128,
              .options = 0, .cluster = 1, .consumers = 2, .keys = 128, .stages = 2, .q_stages = 2,
              .single_tiles = 0, .short_rows = 1, .tracked = 1)
VARIANT_16BIT(forward_sm90_d128, .file = "forward_sm90/forward_sm90", .kernel = "forward_sm90",
              .architecture = 90, .head_dim = 128, .value_dim = 128, .options = 0, .cluster = 1,
              .consumers = 2, .keys = 128, .stages = 2, .q_stages = 2, .single_tiles = 0,
              .short_rows = 0, .tracked = 0)
VARIANT_16BIT(forward_sm90_d192_128, .file = "forward_sm90/forward_sm90", .kernel = "forward_sm90",
              .architecture = 90, .head_dim = 192, .value_dim = 128, .options = 0, .cluster = 1,
              .consumers = 2, .keys = 128, .stages = 2, .q_stages = 1, .single_tiles = 0,
              .short_rows = 0, .tracked = 0)
VARIANT_16BIT(forward_sm90_d192, .file = "forward_sm90/forward_sm90", .kernel = "forward_sm90",
              .architecture = 90, .head_dim = 192, .value_dim = 192, .options = 0, .cluster = 1,
              .consumers = 2, .keys = 96, .stages = 2, .q_stages = 1, .single_tiles = 0,
              .short_rows = 0, .tracked = 1)
VARIANT_16BIT(forward_sm90_d256, .file = "forward_sm90/forward_sm90", .kernel = "forward_sm90",
              .architecture = 90, .head_dim = 256, .value_dim = 256, .options = 0, .cluster = 1,
              .consumers = 2, .keys = 80, .stages = 2, .q_stages = 1, .single_tiles = 0,
              .short_rows = 0, .tracked = 1)
/* Two blocks, a cluster, share a work tile and have half of the values' columns each. */
VARIANT_16BIT(forward_sm90_wide_d320, .file = "forward_sm90_wide/forward_sm90_wide",
              .kernel = "forward_sm90_wide", .architecture = 90, .head_dim = 320, .value_dim = 160,
              .options = 0, .cluster = 2, .consumers = 2, .keys = 128, .stages = 4, .q_stages = 1,
              .chunk = 24576, .v_rows = 64)
VARIANT_16BIT(forward_sm90_wide_d384, .file = "forward_sm90_wide/forward_sm90_wide",
              .kernel = "forward_sm90_wide", .architecture = 90, .head_dim = 384, .value_dim = 192,
              .options = 0, .cluster = 2, .consumers = 2, .keys = 128, .stages = 4, .q_stages = 1,
              .chunk = 24576, .v_rows = 64)
VARIANT_16BIT(forward_sm90_wide_d512, .file = "forward_sm90_wide/forward_sm90_wide",
              .kernel = "forward_sm90_wide", .architecture = 90, .head_dim = 512, .value_dim = 256,
              .options = 0, .cluster = 2, .consumers = 2, .keys = 128, .stages = 4, .q_stages = 1,
              .chunk = 16384, .v_rows = 32)
/* With options. The tiles of those with all of them are multiples of 32 keys, which a block of dropout bits covers. */
VARIANT_16BIT(forward_sm90_d64_softcap, .file = "forward_sm90/forward_sm90",
              .kernel = "forward_sm90", .architecture = 90, .head_dim = 64, .value_dim = 64,
              .options = FA_SM90_SOFTCAP, .cluster = 1, .consumers = 2, .keys = 128, .stages = 4,
              .q_stages = 4, .single_tiles = 0, .short_rows = 0, .tracked = 0)
VARIANT_16BIT(forward_sm90_general64, .file = "forward_sm90/forward_sm90", .kernel = "forward_sm90",
              .architecture = 90, .head_dim = 64, .value_dim = 64, .options = FA_SM90_ALL,
              .cluster = 1, .consumers = 2, .keys = 128, .stages = 4, .q_stages = 1,
              .single_tiles = 0, .short_rows = 0, .tracked = 0)
VARIANT_16BIT(forward_sm90_d96_softcap, .file = "forward_sm90/forward_sm90",
              .kernel = "forward_sm90", .architecture = 90, .head_dim = 96, .value_dim = 96,
              .options = FA_SM90_SOFTCAP, .cluster = 1, .consumers = 2, .keys = 128, .stages = 2,
              .q_stages = 2, .single_tiles = 0, .short_rows = 0, .tracked = 0)
VARIANT_16BIT(forward_sm90_d128_softcap, .file = "forward_sm90/forward_sm90",
              .kernel = "forward_sm90", .architecture = 90, .head_dim = 128, .value_dim = 128,
              .options = FA_SM90_SOFTCAP, .cluster = 1, .consumers = 2, .keys = 128, .stages = 2,
              .q_stages = 2, .single_tiles = 0, .short_rows = 0, .tracked = 0)
VARIANT_16BIT(forward_sm90_d128_alibi, .file = "forward_sm90/forward_sm90",
              .kernel = "forward_sm90", .architecture = 90, .head_dim = 128, .value_dim = 128,
              .options = FA_SM90_ALIBI, .cluster = 1, .consumers = 2, .keys = 128, .stages = 2,
              .q_stages = 2, .single_tiles = 0, .short_rows = 0, .tracked = 0)
VARIANT_16BIT(forward_sm90_d128_bias, .file = "forward_sm90/forward_sm90", .kernel = "forward_sm90",
              .architecture = 90, .head_dim = 128, .value_dim = 128, .options = FA_SM90_BIAS,
              .cluster = 1, .consumers = 2, .keys = 128, .stages = 2, .q_stages = 1,
              .single_tiles = 0, .short_rows = 0, .tracked = 1)
VARIANT_16BIT(forward_sm90_general128, .file = "forward_sm90/forward_sm90",
              .kernel = "forward_sm90", .architecture = 90, .head_dim = 128, .value_dim = 128,
              .options = FA_SM90_ALL, .cluster = 1, .consumers = 2, .keys = 128, .stages = 2,
              .q_stages = 1, .single_tiles = 0, .short_rows = 0, .tracked = 0)
VARIANT_16BIT(forward_sm90_d192_softcap, .file = "forward_sm90/forward_sm90",
              .kernel = "forward_sm90", .architecture = 90, .head_dim = 192, .value_dim = 192,
              .options = FA_SM90_SOFTCAP, .cluster = 1, .consumers = 2, .keys = 96, .stages = 2,
              .q_stages = 1, .single_tiles = 0, .short_rows = 0, .tracked = 1)
VARIANT_16BIT(forward_sm90_d256_softcap, .file = "forward_sm90/forward_sm90",
              .kernel = "forward_sm90", .architecture = 90, .head_dim = 256, .value_dim = 256,
              .options = FA_SM90_SOFTCAP, .cluster = 1, .consumers = 2, .keys = 80, .stages = 2,
              .q_stages = 1, .single_tiles = 0, .short_rows = 0, .tracked = 1)
VARIANT_16BIT(forward_sm90_general256, .file = "forward_sm90/forward_sm90",
              .kernel = "forward_sm90", .architecture = 90, .head_dim = 256, .value_dim = 256,
              .options = FA_SM90_ALL, .cluster = 1, .consumers = 2, .keys = 64, .stages = 2,
              .q_stages = 1, .single_tiles = 0, .short_rows = 0, .tracked = 0)
/* Pages that TMA cannot load, with any options or none, where keys are not split. */
VARIANT_16BIT(forward_sm90_general64_copied, .file = "forward_sm90/forward_sm90",
              .kernel = "forward_sm90", .architecture = 90, .head_dim = 64, .value_dim = 64,
              .options = FA_SM90_ALL, .cluster = 1, .consumers = 2, .keys = 128, .stages = 4,
              .q_stages = 1, .single_tiles = 0, .short_rows = 0, .tracked = 0, .copied = 1)
VARIANT_16BIT(forward_sm90_general128_copied, .file = "forward_sm90/forward_sm90",
              .kernel = "forward_sm90", .architecture = 90, .head_dim = 128, .value_dim = 128,
              .options = FA_SM90_ALL, .cluster = 1, .consumers = 2, .keys = 128, .stages = 2,
              .q_stages = 1, .single_tiles = 0, .short_rows = 0, .tracked = 0, .copied = 1)
VARIANT_16BIT(forward_sm90_general256_copied, .file = "forward_sm90/forward_sm90",
              .kernel = "forward_sm90", .architecture = 90, .head_dim = 256, .value_dim = 256,
              .options = FA_SM90_ALL, .cluster = 1, .consumers = 2, .keys = 64, .stages = 2,
              .q_stages = 1, .single_tiles = 0, .short_rows = 0, .tracked = 0, .copied = 1)
END(forward, sm90)

/* For the sequences of many queries of a mixed batch, beside decode_sm90_persistent. */
FAMILY(forward, sm90_beside)
VARIANT_16BIT(forward_sm90_d128_beside, .file = "forward_sm90/forward_sm90",
              .kernel = "forward_sm90", .architecture = 90, .head_dim = 128, .value_dim = 128,
              .options = 0, .cluster = 1, .consumers = 2, .keys = 128, .stages = 2, .q_stages = 2,
              .single_tiles = 0, .short_rows = 0, .tracked = 0, .beside = 1)
END(forward, sm90_beside)

/* Whose work tiles have a part of the keys each. */
FAMILY(forward, sm90_split)
/* Pages of few rows. */
VARIANT_16BIT(forward_sm90_split_d64_copied, .file = "forward_sm90/forward_sm90",
              .kernel = "forward_sm90_split", .architecture = 90, .head_dim = 64, .value_dim = 64,
              .options = 0, .cluster = 1, .consumers = 2, .keys = 128, .stages = 4, .q_stages = 4,
              .single_tiles = 0, .short_rows = 0, .tracked = 0, .static_smem = 1152, .split = 1,
              .copied = 1)
VARIANT_16BIT(forward_sm90_split_d64, .file = "forward_sm90/forward_sm90",
              .kernel = "forward_sm90_split", .architecture = 90, .head_dim = 64, .value_dim = 64,
              .options = 0, .cluster = 1, .consumers = 2, .keys = 128, .stages = 4, .q_stages = 4,
              .single_tiles = 0, .short_rows = 0, .tracked = 0, .static_smem = 1024, .split = 1)
VARIANT_16BIT(forward_sm90_split_d96, .file = "forward_sm90/forward_sm90",
              .kernel = "forward_sm90_split", .architecture = 90, .head_dim = 96, .value_dim = 96,
              .options = 0, .cluster = 1, .consumers = 2, .keys = 128, .stages = 2, .q_stages = 2,
              .single_tiles = 0, .short_rows = 0, .tracked = 0, .split = 1)
VARIANT_16BIT(forward_sm90_split_d128_copied_overlapped, .file = "forward_sm90/forward_sm90",
              .kernel = "forward_sm90_split", .architecture = 90, .head_dim = 128, .value_dim = 128,
              .options = 0, .cluster = 1, .consumers = 2, .keys = 128, .stages = 2, .q_stages = 2,
              .single_tiles = 0, .short_rows = 0, .tracked = 0, .static_smem = 1024, .split = 1,
              .overlapped = 1, .copied = 1)
VARIANT_16BIT(forward_sm90_split_d128_copied, .file = "forward_sm90/forward_sm90",
              .kernel = "forward_sm90_split", .architecture = 90, .head_dim = 128, .value_dim = 128,
              .options = 0, .cluster = 1, .consumers = 2, .keys = 128, .stages = 2, .q_stages = 2,
              .single_tiles = 0, .short_rows = 0, .tracked = 0, .static_smem = 1024, .split = 1,
              .copied = 1)
VARIANT_16BIT(forward_sm90_split_d128_overlapped, .file = "forward_sm90/forward_sm90",
              .kernel = "forward_sm90_split", .architecture = 90, .head_dim = 128, .value_dim = 128,
              .options = 0, .cluster = 1, .consumers = 2, .keys = 128, .stages = 2, .q_stages = 2,
              .single_tiles = 0, .short_rows = 0, .tracked = 0, .split = 1, .overlapped = 1)
VARIANT_16BIT(forward_sm90_split_d128, .file = "forward_sm90/forward_sm90",
              .kernel = "forward_sm90_split", .architecture = 90, .head_dim = 128, .value_dim = 128,
              .options = 0, .cluster = 1, .consumers = 2, .keys = 128, .stages = 2, .q_stages = 2,
              .single_tiles = 0, .short_rows = 0, .tracked = 0, .split = 1)
VARIANT_16BIT(forward_sm90_split_d256_copied, .file = "forward_sm90/forward_sm90",
              .kernel = "forward_sm90_split", .architecture = 90, .head_dim = 256, .value_dim = 256,
              .options = 0, .cluster = 1, .consumers = 2, .keys = 80, .stages = 2, .q_stages = 1,
              .single_tiles = 0, .short_rows = 0, .tracked = 1, .split = 1, .copied = 1)
VARIANT_16BIT(forward_sm90_split_d192, .file = "forward_sm90/forward_sm90",
              .kernel = "forward_sm90_split", .architecture = 90, .head_dim = 192, .value_dim = 192,
              .options = 0, .cluster = 1, .consumers = 2, .keys = 96, .stages = 2, .q_stages = 1,
              .single_tiles = 0, .short_rows = 0, .tracked = 1, .split = 1)
VARIANT_16BIT(forward_sm90_split_d256, .file = "forward_sm90/forward_sm90",
              .kernel = "forward_sm90_split", .architecture = 90, .head_dim = 256, .value_dim = 256,
              .options = 0, .cluster = 1, .consumers = 2, .keys = 80, .stages = 2, .q_stages = 1,
              .single_tiles = 0, .short_rows = 0, .tracked = 1, .split = 1)
VARIANT_16BIT(forward_sm90_split_d64_softcap_copied, .file = "forward_sm90/forward_sm90",
              .kernel = "forward_sm90_split", .architecture = 90, .head_dim = 64, .value_dim = 64,
              .options = FA_SM90_SOFTCAP, .cluster = 1, .consumers = 2, .keys = 128, .stages = 4,
              .q_stages = 4, .single_tiles = 0, .short_rows = 0, .tracked = 0, .static_smem = 1152,
              .split = 1, .copied = 1)
VARIANT_16BIT(forward_sm90_split_d64_softcap, .file = "forward_sm90/forward_sm90",
              .kernel = "forward_sm90_split", .architecture = 90, .head_dim = 64, .value_dim = 64,
              .options = FA_SM90_SOFTCAP, .cluster = 1, .consumers = 2, .keys = 128, .stages = 4,
              .q_stages = 4, .single_tiles = 0, .short_rows = 0, .tracked = 0, .static_smem = 1024,
              .split = 1)
VARIANT_16BIT(forward_sm90_split_d128_softcap_copied, .file = "forward_sm90/forward_sm90",
              .kernel = "forward_sm90_split", .architecture = 90, .head_dim = 128, .value_dim = 128,
              .options = FA_SM90_SOFTCAP, .cluster = 1, .consumers = 2, .keys = 128, .stages = 2,
              .q_stages = 2, .single_tiles = 0, .short_rows = 0, .tracked = 0, .static_smem = 1024,
              .split = 1, .copied = 1)
VARIANT_16BIT(forward_sm90_split_d128_softcap, .file = "forward_sm90/forward_sm90",
              .kernel = "forward_sm90_split", .architecture = 90, .head_dim = 128, .value_dim = 128,
              .options = FA_SM90_SOFTCAP, .cluster = 1, .consumers = 2, .keys = 128, .stages = 2,
              .q_stages = 2, .single_tiles = 0, .short_rows = 0, .tracked = 0, .split = 1)
VARIANT_16BIT(forward_sm90_split_d256_softcap_copied, .file = "forward_sm90/forward_sm90",
              .kernel = "forward_sm90_split", .architecture = 90, .head_dim = 256, .value_dim = 256,
              .options = FA_SM90_SOFTCAP, .cluster = 1, .consumers = 2, .keys = 80, .stages = 2,
              .q_stages = 1, .single_tiles = 0, .short_rows = 0, .tracked = 1, .split = 1,
              .copied = 1)
VARIANT_16BIT(forward_sm90_split_d192_softcap, .file = "forward_sm90/forward_sm90",
              .kernel = "forward_sm90_split", .architecture = 90, .head_dim = 192, .value_dim = 192,
              .options = FA_SM90_SOFTCAP, .cluster = 1, .consumers = 2, .keys = 96, .stages = 2,
              .q_stages = 1, .single_tiles = 0, .short_rows = 0, .tracked = 1, .split = 1)
VARIANT_16BIT(forward_sm90_split_d256_softcap, .file = "forward_sm90/forward_sm90",
              .kernel = "forward_sm90_split", .architecture = 90, .head_dim = 256, .value_dim = 256,
              .options = FA_SM90_SOFTCAP, .cluster = 1, .consumers = 2, .keys = 80, .stages = 2,
              .q_stages = 1, .single_tiles = 0, .short_rows = 0, .tracked = 1, .split = 1)
END(forward, sm90_split)

/* Merges the parts. */
FAMILY(forward_merge, sm90)
VARIANT_16BIT(forward_sm90_merge, .file = "forward_sm90/merge", .kernel = "forward_sm90_merge",
              .architecture = 90)
VARIANT_16BIT(forward_sm90_merge_lengths, .file = "forward_sm90/merge",
              .kernel = "forward_sm90_merge", .architecture = 90, .own_lengths = 1)
END(forward_merge, sm90)

/* The same for kernels of float32 inputs. */
FAMILY(forward_merge, float32_sm90)
VARIANT(forward_sm90_merge_float32, .file = "forward_sm90/merge_float32",
        .kernel = "forward_sm90_merge_float32", .architecture = 90)
END(forward_merge, float32_sm90)

/* forward_sm90 and forward_sm90_wide for float32 inputs whose products may be rounded to tf32, rounded to float16 by the two
 * launches before. */
FAMILY(forward, tf32_rounded)
VARIANT(forward_tf32_rounded_d128, .file = "forward_sm90/forward_sm90", .kernel = "forward_sm90",
        .architecture = 90, .element = FA_ELEMENT_FLOAT16, .rounded = 1, .head_dim = 128,
        .value_dim = 128, .options = 0, .cluster = 1, .consumers = 2, .keys = 128, .stages = 2,
        .q_stages = 2, .single_tiles = 0, .short_rows = 0, .tracked = 1)
VARIANT(forward_tf32_rounded_d192, .file = "forward_sm90/forward_sm90", .kernel = "forward_sm90",
        .architecture = 90, .element = FA_ELEMENT_FLOAT16, .rounded = 1, .head_dim = 192,
        .value_dim = 192, .options = 0, .cluster = 1, .consumers = 2, .keys = 96, .stages = 2,
        .q_stages = 1, .single_tiles = 0, .short_rows = 0, .tracked = 1)
VARIANT(forward_tf32_rounded_d256, .file = "forward_sm90/forward_sm90", .kernel = "forward_sm90",
        .architecture = 90, .element = FA_ELEMENT_FLOAT16, .rounded = 1, .head_dim = 256,
        .value_dim = 256, .options = 0, .cluster = 1, .consumers = 2, .keys = 80, .stages = 2,
        .q_stages = 1, .single_tiles = 0, .short_rows = 0, .tracked = 1)
VARIANT(forward_tf32_rounded_d320, .file = "forward_sm90_wide/forward_sm90_wide",
        .kernel = "forward_sm90_wide", .architecture = 90, .element = FA_ELEMENT_FLOAT16,
        .rounded = 1, .head_dim = 320, .value_dim = 160, .options = 0, .cluster = 2, .consumers = 2,
        .keys = 128, .stages = 4, .q_stages = 1, .chunk = 24576, .v_rows = 64)
VARIANT(forward_tf32_rounded_d384, .file = "forward_sm90_wide/forward_sm90_wide",
        .kernel = "forward_sm90_wide", .architecture = 90, .element = FA_ELEMENT_FLOAT16,
        .rounded = 1, .head_dim = 384, .value_dim = 192, .options = 0, .cluster = 2, .consumers = 2,
        .keys = 128, .stages = 4, .q_stages = 1, .chunk = 24576, .v_rows = 64)
VARIANT(forward_tf32_rounded_d512, .file = "forward_sm90_wide/forward_sm90_wide",
        .kernel = "forward_sm90_wide", .architecture = 90, .element = FA_ELEMENT_FLOAT16,
        .rounded = 1, .head_dim = 512, .value_dim = 256, .options = 0, .cluster = 2, .consumers = 2,
        .keys = 128, .stages = 4, .q_stages = 1, .chunk = 16384, .v_rows = 32)
END(forward, tf32_rounded)
FAMILY(forward_round, tf32_rounded)
VARIANT(forward_tf32_rounded_round, .file = "forward_sm90_wide/round",
        .kernel = "forward_sm90_round", .architecture = 90)
VARIANT(forward_tf32_rounded_rescale, .file = "forward_sm90_wide/rescale",
        .kernel = "forward_sm90_rescale", .architecture = 90)
END(forward_round, tf32_rounded)

FAMILY(forward, sm80)
VARIANT_16BIT(forward_sm80_d64, .file = "forward_sm80/forward_sm80", .kernel = "forward_sm80",
              .architecture = 80, .head_dim = 64, .options = 0, .warps = 4, .split = 1,
              .group_rows = 32, .keys = 64, .stages = 2, .blocks = 2, .ahead = 8)
VARIANT_16BIT_SUFFIX(forward_sm80_d64, _general, .file = "forward_sm80/forward_sm80",
                     .kernel = "forward_sm80", .architecture = 80, .head_dim = 64,
                     .options = FA_SM80_ALL, .warps = 4, .split = 1, .group_rows = 32, .keys = 64,
                     .stages = 2, .blocks = 2, .ahead = 8)
VARIANT_16BIT(forward_sm80_d96, .file = "forward_sm80/forward_sm80", .kernel = "forward_sm80",
              .architecture = 80, .head_dim = 96, .options = 0, .warps = 4, .split = 1,
              .group_rows = 32, .keys = 64, .stages = 1, .blocks = 2, .ahead = 8)
VARIANT_16BIT_SUFFIX(forward_sm80_d96, _general, .file = "forward_sm80/forward_sm80",
                     .kernel = "forward_sm80", .architecture = 80, .head_dim = 96,
                     .options = FA_SM80_ALL, .warps = 4, .split = 1, .group_rows = 32, .keys = 64,
                     .stages = 1, .blocks = 2, .ahead = 8)
VARIANT_16BIT(forward_sm80_d128, .file = "forward_sm80/forward_sm80", .kernel = "forward_sm80",
              .architecture = 80, .head_dim = 128, .options = 0, .warps = 4, .split = 1,
              .group_rows = 32, .keys = 64, .stages = 1, .blocks = 2, .ahead = 8)
VARIANT_16BIT_SUFFIX(forward_sm80_d128, _general, .file = "forward_sm80/forward_sm80",
                     .kernel = "forward_sm80", .architecture = 80, .head_dim = 128,
                     .options = FA_SM80_ALL, .warps = 4, .split = 1, .group_rows = 32, .keys = 64,
                     .stages = 1, .blocks = 2, .ahead = 8)
/* Two blocks need 185 KiB of a multiprocessor's shared memory; the small one has them on A100. */
VARIANT_16BIT(forward_sm80_d192, .file = "forward_sm80/forward_sm80", .kernel = "forward_sm80",
              .architecture = 80, .head_dim = 192, .options = 0, .warps = 4, .split = 2,
              .group_rows = 32, .keys = 64, .stages = 1, .blocks = 2, .ahead = 4)
VARIANT_16BIT_SUFFIX(forward_sm80_d192, _small, .file = "forward_sm80/forward_sm80",
                     .kernel = "forward_sm80", .architecture = 80, .head_dim = 192, .options = 0,
                     .warps = 4, .split = 1, .group_rows = 16, .keys = 64, .stages = 1, .blocks = 2,
                     .ahead = 8)
VARIANT_16BIT_SUFFIX(forward_sm80_d192, _general, .file = "forward_sm80/forward_sm80",
                     .kernel = "forward_sm80", .architecture = 80, .head_dim = 192,
                     .options = FA_SM80_ALL, .warps = 4, .split = 1, .group_rows = 16, .keys = 64,
                     .stages = 1, .blocks = 2, .ahead = 8)
/* For short tasks, where a multiprocessor's shared memory has room for two blocks (228 KiB). */
VARIANT_16BIT_SUFFIX(forward_sm80_d256, _rows64, .file = "forward_sm80/forward_sm80",
                     .kernel = "forward_sm80", .architecture = 80, .head_dim = 256, .options = 0,
                     .warps = 4, .split = 2, .group_rows = 32, .keys = 64, .stages = 1, .blocks = 2,
                     .ahead = 4)
VARIANT_16BIT(forward_sm80_d256, .file = "forward_sm80/forward_sm80", .kernel = "forward_sm80",
              .architecture = 80, .head_dim = 256, .options = 0, .warps = 8, .split = 2,
              .group_rows = 32, .keys = 64, .stages = 1, .blocks = 1, .ahead = 8)
VARIANT_16BIT_SUFFIX(forward_sm80_d256, _general, .file = "forward_sm80/forward_sm80",
                     .kernel = "forward_sm80", .architecture = 80, .head_dim = 256,
                     .options = FA_SM80_ALL, .warps = 8, .split = 2, .group_rows = 32, .keys = 64,
                     .stages = 1, .blocks = 1, .ahead = 8)
/* For shared memory of 99 KiB (Ada). */
VARIANT_16BIT_SUFFIX(forward_sm80_d256, _small, .file = "forward_sm80/forward_sm80",
                     .kernel = "forward_sm80", .architecture = 80, .head_dim = 256,
                     .options = FA_SM80_ALL, .warps = 4, .split = 1, .group_rows = 16, .keys = 32,
                     .stages = 1, .blocks = 2, .ahead = 4)
VARIANT_16BIT(forward_sm80_d512, .file = "forward_sm80/forward_sm80", .kernel = "forward_sm80",
              .architecture = 80, .head_dim = 512, .options = FA_SM80_ALL, .warps = 8, .split = 4,
              .group_rows = 32, .keys = 64, .stages = 1, .blocks = 1, .ahead = 8)
END(forward, sm80)

/* For few work tiles: each has a part of the keys. */
FAMILY(forward, sm80_split)
VARIANT_16BIT(forward_sm80_split_d64, .file = "forward_sm80/forward_sm80",
              .kernel = "forward_sm80_split", .architecture = 80, .head_dim = 64, .options = 0,
              .warps = 4, .split = 1, .group_rows = 32, .keys = 64, .stages = 2, .blocks = 2,
              .ahead = 1, .split_keys = 1)
VARIANT_16BIT_SUFFIX(forward_sm80_split_d64, _rows64, .file = "forward_sm80/forward_sm80",
                     .kernel = "forward_sm80_split", .architecture = 80, .head_dim = 64,
                     .options = 0, .warps = 4, .split = 1, .group_rows = 16, .keys = 64,
                     .stages = 2, .blocks = 3, .ahead = 1, .split_keys = 1)
VARIANT_16BIT(forward_sm80_split_d96, .file = "forward_sm80/forward_sm80",
              .kernel = "forward_sm80_split", .architecture = 80, .head_dim = 96, .options = 0,
              .warps = 4, .split = 1, .group_rows = 32, .keys = 64, .stages = 1, .blocks = 2,
              .ahead = 1, .split_keys = 1)
VARIANT_16BIT(forward_sm80_split_d128, .file = "forward_sm80/forward_sm80",
              .kernel = "forward_sm80_split", .architecture = 80, .head_dim = 128, .options = 0,
              .warps = 4, .split = 1, .group_rows = 32, .keys = 64, .stages = 1, .blocks = 2,
              .ahead = 1, .split_keys = 1)
VARIANT_16BIT_SUFFIX(forward_sm80_split_d128, _rows64, .file = "forward_sm80/forward_sm80",
                     .kernel = "forward_sm80_split", .architecture = 80, .head_dim = 128,
                     .options = 0, .warps = 4, .split = 1, .group_rows = 16, .keys = 64,
                     .stages = 1, .blocks = 3, .ahead = 1, .split_keys = 1)
VARIANT_16BIT(forward_sm80_split_d192, .file = "forward_sm80/forward_sm80",
              .kernel = "forward_sm80_split", .architecture = 80, .head_dim = 192, .options = 0,
              .warps = 4, .split = 2, .group_rows = 32, .keys = 64, .stages = 1, .blocks = 2,
              .ahead = 1, .split_keys = 1)
VARIANT_16BIT(forward_sm80_split_d256, .file = "forward_sm80/forward_sm80",
              .kernel = "forward_sm80_split", .architecture = 80, .head_dim = 256, .options = 0,
              .warps = 8, .split = 2, .group_rows = 32, .keys = 64, .stages = 1, .blocks = 1,
              .ahead = 1, .split_keys = 1)
/* Also for shared memory of 99 KiB (Ada). */
VARIANT_16BIT_SUFFIX(forward_sm80_split_d256, _rows64, .file = "forward_sm80/forward_sm80",
                     .kernel = "forward_sm80_split", .architecture = 80, .head_dim = 256,
                     .options = 0, .warps = 4, .split = 1, .group_rows = 16, .keys = 32,
                     .stages = 1, .blocks = 2, .ahead = 1, .split_keys = 1)
END(forward, sm80_split)

/* Merges the parts. */
FAMILY(forward_merge, sm80)
VARIANT_16BIT(forward_sm80_merge, .file = "forward_sm80/merge", .kernel = "forward_sm80_merge",
              .architecture = 80)
END(forward_merge, sm80)

FAMILY(forward, sm75)
/* The same source without asynchronous copies, for shared memory of 64 KiB. */
VARIANT(forward_sm75_d64_f16, .file = "forward_sm80/forward_sm80", .kernel = "forward_sm80",
        .architecture = 75, .element = FA_ELEMENT_FLOAT16, .head_dim = 64, .options = FA_SM80_ALL,
        .warps = 4, .split = 1, .group_rows = 32, .keys = 32, .stages = 1, .blocks = 2, .ahead = 4)
VARIANT(forward_sm75_d128_f16, .file = "forward_sm80/forward_sm80", .kernel = "forward_sm80",
        .architecture = 75, .element = FA_ELEMENT_FLOAT16, .head_dim = 128, .options = FA_SM80_ALL,
        .warps = 4, .split = 1, .group_rows = 32, .keys = 32, .stages = 1, .blocks = 2, .ahead = 4)
VARIANT(forward_sm75_d256_f16, .file = "forward_sm80/forward_sm80", .kernel = "forward_sm80",
        .architecture = 75, .element = FA_ELEMENT_FLOAT16, .head_dim = 256, .options = FA_SM80_ALL,
        .warps = 3, .split = 1, .group_rows = 16, .keys = 32, .stages = 1, .blocks = 2, .ahead = 4)
END(forward, sm75)

FAMILY(forward, tf32_sm90)
/* For short rows, and those whose last 192 queries would be few. */
VARIANT(forward_tf32_sm90_d64_two, .file = "forward_tf32_sm90/forward_tf32_sm90",
        .kernel = "forward_tf32_sm90", .architecture = 90, .element = FA_ELEMENT_TF32,
        .head_dim = 64, .value_dim = 64, .options = 0, .cluster = 1, .consumers = 2, .keys = 96,
        .stages = 7, .q_stages = 1, .few_queries = 1)
VARIANT(forward_tf32_sm90_d64, .file = "forward_tf32_sm90/forward_tf32_sm90",
        .kernel = "forward_tf32_sm90", .architecture = 90, .element = FA_ELEMENT_TF32,
        .head_dim = 64, .value_dim = 64, .options = 0, .cluster = 1, .consumers = 3, .keys = 96,
        .stages = 6, .q_stages = 1, .few_queries = 0)
VARIANT(forward_tf32_sm90_d128_two, .file = "forward_tf32_sm90/forward_tf32_sm90",
        .kernel = "forward_tf32_sm90", .architecture = 90, .element = FA_ELEMENT_TF32,
        .head_dim = 128, .value_dim = 128, .options = 0, .cluster = 1, .consumers = 2, .keys = 64,
        .stages = 5, .q_stages = 1, .few_queries = 1)
VARIANT(forward_tf32_sm90_d128, .file = "forward_tf32_sm90/forward_tf32_sm90",
        .kernel = "forward_tf32_sm90", .architecture = 90, .element = FA_ELEMENT_TF32,
        .head_dim = 128, .value_dim = 128, .options = 0, .cluster = 1, .consumers = 3, .keys = 64,
        .stages = 4, .q_stages = 1, .few_queries = 0)
VARIANT(forward_tf32_sm90_d192, .file = "forward_tf32_sm90/forward_tf32_sm90",
        .kernel = "forward_tf32_sm90", .architecture = 90, .element = FA_ELEMENT_TF32,
        .head_dim = 192, .value_dim = 192, .options = 0, .cluster = 1, .consumers = 2, .keys = 32,
        .stages = 5, .q_stages = 1, .few_queries = 0)
VARIANT(forward_tf32_sm90_d256, .file = "forward_tf32_sm90/forward_tf32_sm90",
        .kernel = "forward_tf32_sm90", .architecture = 90, .element = FA_ELEMENT_TF32,
        .head_dim = 256, .value_dim = 256, .options = 0, .cluster = 1, .consumers = 2, .keys = 32,
        .stages = 3, .q_stages = 1, .few_queries = 0)
/* With options. Key tiles of 64 leave registers for a bias that is loaded a tile ahead. */
VARIANT(forward_tf32_sm90_bias64, .file = "forward_tf32_sm90/forward_tf32_sm90",
        .kernel = "forward_tf32_sm90", .architecture = 90, .element = FA_ELEMENT_TF32,
        .head_dim = 64, .value_dim = 64, .options = FA_SM90_FLOAT32_ALL, .cluster = 1,
        .consumers = 2, .keys = 64, .stages = 10, .q_stages = 1, .few_queries = 0, .for_bias = 1)
VARIANT(forward_tf32_sm90_general64, .file = "forward_tf32_sm90/forward_tf32_sm90",
        .kernel = "forward_tf32_sm90", .architecture = 90, .element = FA_ELEMENT_TF32,
        .head_dim = 64, .value_dim = 64, .options = FA_SM90_FLOAT32_ALL, .cluster = 1,
        .consumers = 2, .keys = 96, .stages = 7, .q_stages = 1, .few_queries = 0)
VARIANT(forward_tf32_sm90_general128, .file = "forward_tf32_sm90/forward_tf32_sm90",
        .kernel = "forward_tf32_sm90", .architecture = 90, .element = FA_ELEMENT_TF32,
        .head_dim = 128, .value_dim = 128, .options = FA_SM90_FLOAT32_ALL, .cluster = 1,
        .consumers = 2, .keys = 64, .stages = 5, .q_stages = 1, .few_queries = 0)
VARIANT(forward_tf32_sm90_general192, .file = "forward_tf32_sm90/forward_tf32_sm90",
        .kernel = "forward_tf32_sm90", .architecture = 90, .element = FA_ELEMENT_TF32,
        .head_dim = 192, .value_dim = 192, .options = FA_SM90_FLOAT32_ALL, .cluster = 1,
        .consumers = 2, .keys = 32, .stages = 5, .q_stages = 1, .few_queries = 0)
VARIANT(forward_tf32_sm90_general256, .file = "forward_tf32_sm90/forward_tf32_sm90",
        .kernel = "forward_tf32_sm90", .architecture = 90, .element = FA_ELEMENT_TF32,
        .head_dim = 256, .value_dim = 256, .options = FA_SM90_FLOAT32_ALL, .cluster = 1,
        .consumers = 2, .keys = 32, .stages = 3, .q_stages = 1, .few_queries = 0)
/* Wide heads: high parts of float16 in a cluster, as in the next family. */
VARIANT(forward_tf32_sm90_d288, .file = "forward_f16x3_sm90/forward_f16x3_sm90",
        .kernel = "forward_f16x3_sm90", .architecture = 90, .element = FA_ELEMENT_TF32,
        .head_dim = 288, .value_dim = 144, .options = 0, .cluster = 2, .consumers = 2, .keys = 64,
        .stages = 6, .q_stages = 1, .chunk = 16384, .few_queries = 0)
VARIANT(forward_tf32_sm90_d320, .file = "forward_f16x3_sm90/forward_f16x3_sm90",
        .kernel = "forward_f16x3_sm90", .architecture = 90, .element = FA_ELEMENT_TF32,
        .head_dim = 320, .value_dim = 160, .options = 0, .cluster = 2, .consumers = 2, .keys = 64,
        .stages = 6, .q_stages = 1, .chunk = 16384, .few_queries = 0)
VARIANT(forward_tf32_sm90_d384, .file = "forward_f16x3_sm90/forward_f16x3_sm90",
        .kernel = "forward_f16x3_sm90", .architecture = 90, .element = FA_ELEMENT_TF32,
        .head_dim = 384, .value_dim = 192, .options = 0, .cluster = 2, .consumers = 2, .keys = 64,
        .stages = 6, .q_stages = 1, .chunk = 16384, .few_queries = 0)
VARIANT(forward_tf32_sm90_d512, .file = "forward_f16x3_sm90/forward_f16x3_sm90",
        .kernel = "forward_f16x3_sm90", .architecture = 90, .element = FA_ELEMENT_TF32,
        .head_dim = 512, .value_dim = 256, .options = 0, .cluster = 2, .consumers = 2, .keys = 32,
        .stages = 5, .q_stages = 1, .chunk = 16384, .few_queries = 0)
VARIANT(forward_tf32_sm90_general384, .file = "forward_f16x3_sm90/forward_f16x3_sm90",
        .kernel = "forward_f16x3_sm90", .architecture = 90, .element = FA_ELEMENT_TF32,
        .head_dim = 384, .value_dim = 192, .options = FA_SM90_FLOAT32_ALL, .cluster = 2,
        .consumers = 2, .keys = 64, .stages = 6, .q_stages = 1, .chunk = 16384, .few_queries = 0)
VARIANT(forward_tf32_sm90_general512, .file = "forward_f16x3_sm90/forward_f16x3_sm90",
        .kernel = "forward_f16x3_sm90", .architecture = 90, .element = FA_ELEMENT_TF32,
        .head_dim = 512, .value_dim = 256, .options = FA_SM90_FLOAT32_ALL, .cluster = 2,
        .consumers = 2, .keys = 32, .stages = 5, .q_stages = 1, .chunk = 16384, .few_queries = 0)
END(forward, tf32_sm90)

FAMILY(forward, f16x3_sm90)
/* Float32 inputs as sums of two float16 numbers. */
VARIANT(forward_f16x3_sm90_d64, .file = "forward_f16x3_sm90/forward_f16x3_sm90",
        .kernel = "forward_f16x3_sm90", .architecture = 90, .element = FA_ELEMENT_FLOAT16X3,
        .head_dim = 64, .value_dim = 64, .options = 0, .cluster = 1, .consumers = 2, .keys = 64,
        .stages = 8, .q_stages = 1)
/* For few short rows. */
VARIANT(forward_f16x3_sm90_d128_one, .file = "forward_f16x3_sm90/forward_f16x3_sm90",
        .kernel = "forward_f16x3_sm90", .architecture = 90, .element = FA_ELEMENT_FLOAT16X3,
        .head_dim = 128, .value_dim = 128, .options = 0, .cluster = 1, .consumers = 1, .keys = 64,
        .stages = 5, .q_stages = 1, .few_queries = 1)
VARIANT(forward_f16x3_sm90_d128, .file = "forward_f16x3_sm90/forward_f16x3_sm90",
        .kernel = "forward_f16x3_sm90", .architecture = 90, .element = FA_ELEMENT_FLOAT16X3,
        .head_dim = 128, .value_dim = 128, .options = 0, .cluster = 1, .consumers = 2, .keys = 64,
        .stages = 5, .q_stages = 1)
VARIANT(forward_f16x3_sm90_d192_one, .file = "forward_f16x3_sm90/forward_f16x3_sm90",
        .kernel = "forward_f16x3_sm90", .architecture = 90, .element = FA_ELEMENT_FLOAT16X3,
        .head_dim = 192, .value_dim = 192, .options = 0, .cluster = 1, .consumers = 1, .keys = 64,
        .stages = 8, .q_stages = 1, .chunk = 16384, .few_queries = 1)
VARIANT(forward_f16x3_sm90_d192, .file = "forward_f16x3_sm90/forward_f16x3_sm90",
        .kernel = "forward_f16x3_sm90", .architecture = 90, .element = FA_ELEMENT_FLOAT16X3,
        .head_dim = 192, .value_dim = 192, .options = 0, .cluster = 1, .consumers = 2, .keys = 64,
        .stages = 8, .q_stages = 1, .chunk = 16384)
VARIANT(forward_f16x3_sm90_d256_one, .file = "forward_f16x3_sm90/forward_f16x3_sm90",
        .kernel = "forward_f16x3_sm90", .architecture = 90, .element = FA_ELEMENT_FLOAT16X3,
        .head_dim = 256, .value_dim = 256, .options = 0, .cluster = 1, .consumers = 1, .keys = 32,
        .stages = 3, .q_stages = 1, .few_queries = 1)
VARIANT(forward_f16x3_sm90_d256, .file = "forward_f16x3_sm90/forward_f16x3_sm90",
        .kernel = "forward_f16x3_sm90", .architecture = 90, .element = FA_ELEMENT_FLOAT16X3,
        .head_dim = 256, .value_dim = 256, .options = 0, .cluster = 1, .consumers = 2, .keys = 32,
        .stages = 3, .q_stages = 1)
/* With options. */
VARIANT(forward_f16x3_sm90_bias64, .file = "forward_f16x3_sm90/forward_f16x3_sm90",
        .kernel = "forward_f16x3_sm90", .architecture = 90, .element = FA_ELEMENT_FLOAT16X3,
        .head_dim = 64, .value_dim = 64, .options = FA_SM90_FLOAT32_ALL, .cluster = 1,
        .consumers = 2, .keys = 64, .stages = 8, .q_stages = 1, .for_bias = 1)
VARIANT(forward_f16x3_sm90_general64, .file = "forward_f16x3_sm90/forward_f16x3_sm90",
        .kernel = "forward_f16x3_sm90", .architecture = 90, .element = FA_ELEMENT_FLOAT16X3,
        .head_dim = 64, .value_dim = 64, .options = FA_SM90_FLOAT32_ALL, .cluster = 1,
        .consumers = 2, .keys = 64, .stages = 8, .q_stages = 1)
VARIANT(forward_f16x3_sm90_bias128_one, .file = "forward_f16x3_sm90/forward_f16x3_sm90",
        .kernel = "forward_f16x3_sm90", .architecture = 90, .element = FA_ELEMENT_FLOAT16X3,
        .head_dim = 128, .value_dim = 128, .options = FA_SM90_FLOAT32_ALL, .cluster = 1,
        .consumers = 1, .keys = 64, .stages = 5, .q_stages = 1, .for_bias = 1, .few_queries = 1)
VARIANT(forward_f16x3_sm90_bias128, .file = "forward_f16x3_sm90/forward_f16x3_sm90",
        .kernel = "forward_f16x3_sm90", .architecture = 90, .element = FA_ELEMENT_FLOAT16X3,
        .head_dim = 128, .value_dim = 128, .options = FA_SM90_FLOAT32_ALL, .cluster = 1,
        .consumers = 2, .keys = 64, .stages = 5, .q_stages = 1, .for_bias = 1)
VARIANT(forward_f16x3_sm90_general128, .file = "forward_f16x3_sm90/forward_f16x3_sm90",
        .kernel = "forward_f16x3_sm90", .architecture = 90, .element = FA_ELEMENT_FLOAT16X3,
        .head_dim = 128, .value_dim = 128, .options = FA_SM90_FLOAT32_ALL, .cluster = 1,
        .consumers = 2, .keys = 64, .stages = 5, .q_stages = 1)
VARIANT(forward_f16x3_sm90_bias192_one, .file = "forward_f16x3_sm90/forward_f16x3_sm90",
        .kernel = "forward_f16x3_sm90", .architecture = 90, .element = FA_ELEMENT_FLOAT16X3,
        .head_dim = 192, .value_dim = 192, .options = FA_SM90_FLOAT32_ALL, .cluster = 1,
        .consumers = 1, .keys = 32, .stages = 5, .q_stages = 1, .for_bias = 1, .few_queries = 1)
VARIANT(forward_f16x3_sm90_bias192, .file = "forward_f16x3_sm90/forward_f16x3_sm90",
        .kernel = "forward_f16x3_sm90", .architecture = 90, .element = FA_ELEMENT_FLOAT16X3,
        .head_dim = 192, .value_dim = 192, .options = FA_SM90_FLOAT32_ALL, .cluster = 1,
        .consumers = 2, .keys = 32, .stages = 5, .q_stages = 1, .for_bias = 1)
VARIANT(forward_f16x3_sm90_general192, .file = "forward_f16x3_sm90/forward_f16x3_sm90",
        .kernel = "forward_f16x3_sm90", .architecture = 90, .element = FA_ELEMENT_FLOAT16X3,
        .head_dim = 192, .value_dim = 192, .options = FA_SM90_FLOAT32_ALL, .cluster = 1,
        .consumers = 2, .keys = 32, .stages = 5, .q_stages = 1)
VARIANT(forward_f16x3_sm90_general256_one, .file = "forward_f16x3_sm90/forward_f16x3_sm90",
        .kernel = "forward_f16x3_sm90", .architecture = 90, .element = FA_ELEMENT_FLOAT16X3,
        .head_dim = 256, .value_dim = 256, .options = FA_SM90_FLOAT32_ALL, .cluster = 1,
        .consumers = 1, .keys = 32, .stages = 3, .q_stages = 1, .few_queries = 1)
VARIANT(forward_f16x3_sm90_general256, .file = "forward_f16x3_sm90/forward_f16x3_sm90",
        .kernel = "forward_f16x3_sm90", .architecture = 90, .element = FA_ELEMENT_FLOAT16X3,
        .head_dim = 256, .value_dim = 256, .options = FA_SM90_FLOAT32_ALL, .cluster = 1,
        .consumers = 2, .keys = 32, .stages = 3, .q_stages = 1)
/* Two blocks, a cluster, share a work tile and have half of the columns each. */
VARIANT(forward_f16x3_sm90_d288, .file = "forward_f16x3_sm90/forward_f16x3_sm90",
        .kernel = "forward_f16x3_sm90", .architecture = 90, .element = FA_ELEMENT_FLOAT16X3,
        .head_dim = 288, .value_dim = 144, .options = 0, .cluster = 2, .consumers = 2, .keys = 64,
        .stages = 6, .q_stages = 1, .chunk = 16384)
VARIANT(forward_f16x3_sm90_d320, .file = "forward_f16x3_sm90/forward_f16x3_sm90",
        .kernel = "forward_f16x3_sm90", .architecture = 90, .element = FA_ELEMENT_FLOAT16X3,
        .head_dim = 320, .value_dim = 160, .options = 0, .cluster = 2, .consumers = 2, .keys = 64,
        .stages = 6, .q_stages = 1, .chunk = 16384)
VARIANT(forward_f16x3_sm90_d384, .file = "forward_f16x3_sm90/forward_f16x3_sm90",
        .kernel = "forward_f16x3_sm90", .architecture = 90, .element = FA_ELEMENT_FLOAT16X3,
        .head_dim = 384, .value_dim = 192, .options = 0, .cluster = 2, .consumers = 2, .keys = 64,
        .stages = 6, .q_stages = 1, .chunk = 16384)
VARIANT(forward_f16x3_sm90_d512, .file = "forward_f16x3_sm90/forward_f16x3_sm90",
        .kernel = "forward_f16x3_sm90", .architecture = 90, .element = FA_ELEMENT_FLOAT16X3,
        .head_dim = 512, .value_dim = 256, .options = 0, .cluster = 2, .consumers = 2, .keys = 32,
        .stages = 5, .q_stages = 1, .chunk = 16384)
VARIANT(forward_f16x3_sm90_general384, .file = "forward_f16x3_sm90/forward_f16x3_sm90",
        .kernel = "forward_f16x3_sm90", .architecture = 90, .element = FA_ELEMENT_FLOAT16X3,
        .head_dim = 384, .value_dim = 192, .options = FA_SM90_FLOAT32_ALL, .cluster = 2,
        .consumers = 2, .keys = 64, .stages = 6, .q_stages = 1, .chunk = 16384)
VARIANT(forward_f16x3_sm90_general512, .file = "forward_f16x3_sm90/forward_f16x3_sm90",
        .kernel = "forward_f16x3_sm90", .architecture = 90, .element = FA_ELEMENT_FLOAT16X3,
        .head_dim = 512, .value_dim = 256, .options = FA_SM90_FLOAT32_ALL, .cluster = 2,
        .consumers = 2, .keys = 32, .stages = 5, .q_stages = 1, .chunk = 16384)
END(forward, f16x3_sm90)

FAMILY(forward, tf32)
/* The same source for float32 inputs whose products may be rounded to tf32. Head dims above 256 need 212 KiB of shared
 * memory (Hopper). */
VARIANT(forward_tf32_d64, .file = "forward_sm80/forward_sm80", .kernel = "forward_sm80",
        .architecture = 80, .element = FA_ELEMENT_TF32, .head_dim = 64, .options = 0, .warps = 4,
        .split = 1, .group_rows = 32, .keys = 64, .stages = 1, .blocks = 2, .ahead = 8)
VARIANT(forward_tf32_d64_general, .file = "forward_sm80/forward_sm80", .kernel = "forward_sm80",
        .architecture = 80, .element = FA_ELEMENT_TF32, .head_dim = 64, .options = FA_SM80_ALL,
        .warps = 4, .split = 1, .group_rows = 32, .keys = 64, .stages = 1, .blocks = 2, .ahead = 8)
VARIANT(forward_tf32_d128, .file = "forward_sm80/forward_sm80", .kernel = "forward_sm80",
        .architecture = 80, .element = FA_ELEMENT_TF32, .head_dim = 128, .options = 0, .warps = 4,
        .split = 1, .group_rows = 32, .keys = 32, .stages = 1, .blocks = 2, .ahead = 8)
VARIANT(forward_tf32_d128_general, .file = "forward_sm80/forward_sm80", .kernel = "forward_sm80",
        .architecture = 80, .element = FA_ELEMENT_TF32, .head_dim = 128, .options = FA_SM80_ALL,
        .warps = 4, .split = 1, .group_rows = 32, .keys = 32, .stages = 1, .blocks = 2, .ahead = 8)
/* For shared memory of 99 KiB (Ada, consumer Ampere). */
VARIANT(forward_tf32_d128_small, .file = "forward_sm80/forward_sm80", .kernel = "forward_sm80",
        .architecture = 80, .element = FA_ELEMENT_TF32, .head_dim = 128, .options = FA_SM80_ALL,
        .warps = 4, .split = 1, .group_rows = 16, .keys = 32, .stages = 1, .blocks = 2, .ahead = 8)
VARIANT(forward_tf32_d256, .file = "forward_sm80/forward_sm80", .kernel = "forward_sm80",
        .architecture = 80, .element = FA_ELEMENT_TF32, .head_dim = 256, .options = 0, .warps = 4,
        .split = 2, .group_rows = 32, .keys = 32, .stages = 1, .blocks = 1, .ahead = 8)
VARIANT(forward_tf32_d256_general, .file = "forward_sm80/forward_sm80", .kernel = "forward_sm80",
        .architecture = 80, .element = FA_ELEMENT_TF32, .head_dim = 256, .options = FA_SM80_ALL,
        .warps = 4, .split = 2, .group_rows = 32, .keys = 32, .stages = 1, .blocks = 1, .ahead = 8)
VARIANT(forward_tf32_d512, .file = "forward_sm80/forward_sm80", .kernel = "forward_sm80",
        .architecture = 80, .element = FA_ELEMENT_TF32, .head_dim = 512, .options = FA_SM80_ALL,
        .warps = 4, .split = 2, .group_rows = 16, .keys = 32, .stages = 1, .blocks = 1, .ahead = 8)
END(forward, tf32)

FAMILY(forward, tf32x3)
/* Three products in tf32 for each of float32. */
VARIANT(forward_tf32x3_d64, .file = "forward_sm80/forward_sm80", .kernel = "forward_sm80",
        .architecture = 80, .element = FA_ELEMENT_TF32X3, .head_dim = 64, .options = 0, .warps = 4,
        .split = 1, .group_rows = 16, .keys = 32, .stages = 1, .blocks = 2, .ahead = 8)
VARIANT(forward_tf32x3_d64_general, .file = "forward_sm80/forward_sm80", .kernel = "forward_sm80",
        .architecture = 80, .element = FA_ELEMENT_TF32X3, .head_dim = 64, .options = FA_SM80_ALL,
        .warps = 4, .split = 1, .group_rows = 16, .keys = 32, .stages = 1, .blocks = 2, .ahead = 8)
VARIANT(forward_tf32x3_d128, .file = "forward_sm80/forward_sm80", .kernel = "forward_sm80",
        .architecture = 80, .element = FA_ELEMENT_TF32X3, .head_dim = 128, .options = 0, .warps = 4,
        .split = 1, .group_rows = 16, .keys = 32, .stages = 1, .blocks = 2, .ahead = 8)
VARIANT(forward_tf32x3_d128_general, .file = "forward_sm80/forward_sm80", .kernel = "forward_sm80",
        .architecture = 80, .element = FA_ELEMENT_TF32X3, .head_dim = 128, .options = FA_SM80_ALL,
        .warps = 4, .split = 1, .group_rows = 16, .keys = 32, .stages = 1, .blocks = 2, .ahead = 8)
VARIANT(forward_tf32x3_d256, .file = "forward_sm80/forward_sm80", .kernel = "forward_sm80",
        .architecture = 80, .element = FA_ELEMENT_TF32X3, .head_dim = 256, .options = 0, .warps = 8,
        .split = 2, .group_rows = 16, .keys = 32, .stages = 1, .blocks = 1, .ahead = 8)
VARIANT(forward_tf32x3_d256_general, .file = "forward_sm80/forward_sm80", .kernel = "forward_sm80",
        .architecture = 80, .element = FA_ELEMENT_TF32X3, .head_dim = 256, .options = FA_SM80_ALL,
        .warps = 8, .split = 2, .group_rows = 16, .keys = 32, .stages = 1, .blocks = 1, .ahead = 8)
END(forward, tf32x3)

FAMILY(forward, simt)
VARIANT(forward_simt_d64, .file = "forward_simt/forward_simt", .kernel = "forward_simt",
        .architecture = 75, .element = FA_ELEMENT_FLOAT32, .head_dim = 64, .keys = 64, .chunk = 64,
        .rows = 4)
VARIANT(forward_simt_d128, .file = "forward_simt/forward_simt", .kernel = "forward_simt",
        .architecture = 75, .each_architecture = 1, .element = FA_ELEMENT_FLOAT32, .head_dim = 128,
        .keys = 32, .chunk = 128, .rows = 4)
VARIANT(forward_simt_d256, .file = "forward_simt/forward_simt", .kernel = "forward_simt",
        .architecture = 75, .element = FA_ELEMENT_FLOAT32, .head_dim = 256, .keys = 32,
        .chunk = 128, .rows = 4)
VARIANT(forward_simt_d512, .file = "forward_simt/forward_simt", .kernel = "forward_simt",
        .architecture = 75, .element = FA_ELEMENT_FLOAT32, .head_dim = 512, .keys = 32,
        .chunk = 128, .rows = 2)
END(forward, simt)

FAMILY(decode, sm80)
/* A work tile's rows are query heads that share keys, and a few queries. */
VARIANT_16BIT(decode_sm80_d64, .file = "decode_sm80/decode_sm80", .kernel = "decode_sm80",
              .architecture = 80, .head_dim = 64, .options = FA_DECODE_BY_ROWS, .warps = 4,
              .group_rows = 16, .keys = 32, .stages = 2, .static_smem = 256, .blocks = 3)
VARIANT_16BIT(decode_sm80_d128, .file = "decode_sm80/decode_sm80", .kernel = "decode_sm80",
              .architecture = 80, .head_dim = 128, .options = FA_DECODE_BY_ROWS, .warps = 4,
              .group_rows = 16, .keys = 16, .stages = 2, .static_smem = 256, .blocks = 3)
VARIANT_16BIT_SUFFIX(decode_sm80_d128, _rows32, .file = "decode_sm80/decode_sm80",
                     .kernel = "decode_sm80", .architecture = 80, .head_dim = 128, .options = 0,
                     .warps = 4, .group_rows = 32, .keys = 16, .stages = 2, .static_smem = 256,
                     .blocks = 2)
VARIANT_16BIT(decode_sm80_d256, .file = "decode_sm80/decode_sm80", .kernel = "decode_sm80",
              .architecture = 80, .head_dim = 256, .options = 0, .warps = 2, .group_rows = 16,
              .keys = 16, .stages = 2, .static_smem = 256, .blocks = 2)
/* Latent attention: values are the first columns of the keys. */
VARIANT_16BIT(decode_sm80_latent, .file = "decode_sm80/decode_sm80", .kernel = "decode_sm80",
              .architecture = 80, .head_dim = 576, .value_dim = 512, .options = 0, .warps = 8,
              .group_rows = 16, .keys = 64, .stages = 3, .static_smem = 256, .blocks = 1)
/* Keys and values of 8 bits, queries of either 16-bit type. */
VARIANT(decode_sm80_d64_e4m3, .file = "decode_sm80/decode_sm80", .kernel = "decode_sm80",
        .architecture = 80, .each_architecture = 1, .element = FA_ELEMENT_FLOAT16,
        .cache = FA_ELEMENT_FLOAT8_E4M3, .head_dim = 64, .options = FA_DECODE_BY_ROWS, .warps = 4,
        .group_rows = 16, .keys = 32, .stages = 3, .static_smem = 256, .blocks = 4)
VARIANT(decode_sm80_d128_e4m3, .file = "decode_sm80/decode_sm80", .kernel = "decode_sm80",
        .architecture = 80, .each_architecture = 1, .element = FA_ELEMENT_FLOAT16,
        .cache = FA_ELEMENT_FLOAT8_E4M3, .head_dim = 128, .options = FA_DECODE_BY_ROWS, .warps = 4,
        .group_rows = 16, .keys = 32, .stages = 2, .static_smem = 256, .blocks = 3)
VARIANT(decode_sm80_d128_e4m3_rows32, .file = "decode_sm80/decode_sm80", .kernel = "decode_sm80",
        .architecture = 80, .each_architecture = 1, .element = FA_ELEMENT_FLOAT16,
        .cache = FA_ELEMENT_FLOAT8_E4M3, .head_dim = 128, .options = 0, .warps = 4,
        .group_rows = 32, .keys = 32, .stages = 2, .static_smem = 256, .blocks = 2)
VARIANT(decode_sm80_d256_e4m3, .file = "decode_sm80/decode_sm80", .kernel = "decode_sm80",
        .architecture = 80, .each_architecture = 1, .element = FA_ELEMENT_FLOAT16,
        .cache = FA_ELEMENT_FLOAT8_E4M3, .head_dim = 256, .options = 0, .warps = 2,
        .group_rows = 16, .keys = 32, .stages = 2, .static_smem = 256, .blocks = 3)
VARIANT(decode_sm80_d64_int8, .file = "decode_sm80/decode_sm80", .kernel = "decode_sm80",
        .architecture = 80, .element = FA_ELEMENT_FLOAT16, .cache = FA_ELEMENT_INT8, .head_dim = 64,
        .options = FA_DECODE_BY_ROWS, .warps = 4, .group_rows = 16, .keys = 32, .stages = 3,
        .static_smem = 256, .blocks = 4)
VARIANT(decode_sm80_d128_int8, .file = "decode_sm80/decode_sm80", .kernel = "decode_sm80",
        .architecture = 80, .element = FA_ELEMENT_FLOAT16, .cache = FA_ELEMENT_INT8,
        .head_dim = 128, .options = FA_DECODE_BY_ROWS, .warps = 4, .group_rows = 16, .keys = 32,
        .stages = 2, .static_smem = 256, .blocks = 3)
VARIANT(decode_sm80_d128_int8_rows32, .file = "decode_sm80/decode_sm80", .kernel = "decode_sm80",
        .architecture = 80, .element = FA_ELEMENT_FLOAT16, .cache = FA_ELEMENT_INT8,
        .head_dim = 128, .options = 0, .warps = 4, .group_rows = 32, .keys = 32, .stages = 2,
        .static_smem = 256, .blocks = 2)
VARIANT(decode_sm80_d256_int8, .file = "decode_sm80/decode_sm80", .kernel = "decode_sm80",
        .architecture = 80, .element = FA_ELEMENT_FLOAT16, .cache = FA_ELEMENT_INT8,
        .head_dim = 256, .options = 0, .warps = 2, .group_rows = 16, .keys = 32, .stages = 2,
        .static_smem = 256, .blocks = 3)
END(decode, sm80)

/* The same by wgmma and TMA. */
FAMILY(decode, sm90)
VARIANT_16BIT(decode_sm90_d64, .file = "decode_sm90/decode_sm90", .kernel = "decode_sm90",
              .architecture = 90, .head_dim = 64, .options = 0, .group_rows = 8, .keys = 128,
              .stages = 4, .static_smem = 608, .blocks = 3)
VARIANT_16BIT_SUFFIX(decode_sm90_d64, _rows16, .file = "decode_sm90/decode_sm90",
                     .kernel = "decode_sm90", .architecture = 90, .head_dim = 64, .options = 0,
                     .group_rows = 16, .keys = 128, .stages = 5, .static_smem = 800, .blocks = 2)
VARIANT_16BIT_SUFFIX(decode_sm90_d64, _rows32, .file = "decode_sm90/decode_sm90",
                     .kernel = "decode_sm90", .architecture = 90, .head_dim = 64, .options = 0,
                     .group_rows = 32, .keys = 128, .stages = 5, .static_smem = 1184, .blocks = 2)
VARIANT_16BIT(decode_sm90_d128, .file = "decode_sm90/decode_sm90", .kernel = "decode_sm90",
              .architecture = 90, .head_dim = 128, .options = 0, .group_rows = 8, .keys = 64,
              .stages = 4, .static_smem = 608, .blocks = 3)
VARIANT_16BIT_SUFFIX(decode_sm90_d128, _rows16, .file = "decode_sm90/decode_sm90",
                     .kernel = "decode_sm90", .architecture = 90, .head_dim = 128, .options = 0,
                     .group_rows = 16, .keys = 64, .stages = 5, .static_smem = 800, .blocks = 2)
VARIANT_16BIT_SUFFIX(decode_sm90_d128, _rows32, .file = "decode_sm90/decode_sm90",
                     .kernel = "decode_sm90", .architecture = 90, .head_dim = 128, .options = 0,
                     .group_rows = 32, .keys = 64, .stages = 5, .static_smem = 1184, .blocks = 2)
VARIANT_16BIT(decode_sm90_d192, .file = "decode_sm90/decode_sm90", .kernel = "decode_sm90",
              .architecture = 90, .head_dim = 192, .options = 0, .group_rows = 8, .keys = 128,
              .stages = 6, .static_smem = 608, .blocks = 2)
VARIANT_16BIT_SUFFIX(decode_sm90_d192, _rows16, .file = "decode_sm90/decode_sm90",
                     .kernel = "decode_sm90", .architecture = 90, .head_dim = 192, .options = 0,
                     .group_rows = 16, .keys = 128, .stages = 6, .static_smem = 800, .blocks = 2)
VARIANT_16BIT_SUFFIX(decode_sm90_d192, _rows32, .file = "decode_sm90/decode_sm90",
                     .kernel = "decode_sm90", .architecture = 90, .head_dim = 192, .options = 0,
                     .group_rows = 32, .keys = 128, .stages = 5, .static_smem = 1184, .blocks = 2)
VARIANT_16BIT(decode_sm90_d256, .file = "decode_sm90/decode_sm90", .kernel = "decode_sm90",
              .architecture = 90, .head_dim = 256, .options = 0, .group_rows = 8, .keys = 64,
              .stages = 4, .static_smem = 608, .blocks = 3)
VARIANT_16BIT_SUFFIX(decode_sm90_d256, _rows16, .file = "decode_sm90/decode_sm90",
                     .kernel = "decode_sm90", .architecture = 90, .head_dim = 256, .options = 0,
                     .group_rows = 16, .keys = 64, .stages = 5, .static_smem = 800, .blocks = 2)
VARIANT_16BIT_SUFFIX(decode_sm90_d256, _rows32, .file = "decode_sm90/decode_sm90",
                     .kernel = "decode_sm90", .architecture = 90, .head_dim = 256, .options = 0,
                     .group_rows = 32, .keys = 64, .stages = 5, .static_smem = 1184, .blocks = 2)
/* Rows are copied: for pages that are too small for TMA, and where that is faster. */
VARIANT_16BIT_SUFFIX(decode_sm90_d64, _copied, .file = "decode_sm90/decode_sm90",
                     .kernel = "decode_sm90", .architecture = 90, .head_dim = 64, .options = 0,
                     .group_rows = 8, .keys = 128, .stages = 5, .static_smem = 608, .blocks = 2,
                     .copied = 1)
VARIANT_16BIT_SUFFIX(decode_sm90_d64, _copied_rows16, .file = "decode_sm90/decode_sm90",
                     .kernel = "decode_sm90", .architecture = 90, .head_dim = 64, .options = 0,
                     .group_rows = 16, .keys = 128, .stages = 5, .static_smem = 800, .blocks = 2,
                     .copied = 1)
VARIANT_16BIT_SUFFIX(decode_sm90_d64, _copied_rows32, .file = "decode_sm90/decode_sm90",
                     .kernel = "decode_sm90", .architecture = 90, .head_dim = 64, .options = 0,
                     .group_rows = 32, .keys = 128, .stages = 5, .static_smem = 1184, .blocks = 2,
                     .copied = 1)
VARIANT_16BIT_SUFFIX(decode_sm90_d128, _copied, .file = "decode_sm90/decode_sm90",
                     .kernel = "decode_sm90", .architecture = 90, .head_dim = 128, .options = 0,
                     .group_rows = 8, .keys = 64, .stages = 5, .static_smem = 608, .blocks = 2,
                     .copied = 1)
VARIANT_16BIT_SUFFIX(decode_sm90_d128, _copied_rows16, .file = "decode_sm90/decode_sm90",
                     .kernel = "decode_sm90", .architecture = 90, .head_dim = 128, .options = 0,
                     .group_rows = 16, .keys = 64, .stages = 5, .static_smem = 800, .blocks = 2,
                     .copied = 1)
VARIANT_16BIT_SUFFIX(decode_sm90_d128, _copied_rows32, .file = "decode_sm90/decode_sm90",
                     .kernel = "decode_sm90", .architecture = 90, .head_dim = 128, .options = 0,
                     .group_rows = 32, .keys = 64, .stages = 5, .static_smem = 1184, .blocks = 2,
                     .copied = 1)
VARIANT_16BIT_SUFFIX(decode_sm90_d256, _copied, .file = "decode_sm90/decode_sm90",
                     .kernel = "decode_sm90", .architecture = 90, .head_dim = 256, .options = 0,
                     .group_rows = 8, .keys = 64, .stages = 5, .static_smem = 608, .blocks = 2,
                     .copied = 1)
VARIANT_16BIT_SUFFIX(decode_sm90_d256, _copied_rows16, .file = "decode_sm90/decode_sm90",
                     .kernel = "decode_sm90", .architecture = 90, .head_dim = 256, .options = 0,
                     .group_rows = 16, .keys = 64, .stages = 5, .static_smem = 800, .blocks = 2,
                     .copied = 1)
VARIANT_16BIT_SUFFIX(decode_sm90_d256, _copied_rows32, .file = "decode_sm90/decode_sm90",
                     .kernel = "decode_sm90", .architecture = 90, .head_dim = 256, .options = 0,
                     .group_rows = 32, .keys = 64, .stages = 5, .static_smem = 1184, .blocks = 2,
                     .copied = 1)
/* Keys and values of 8 bits, queries of either 16-bit type. */
VARIANT(decode_sm90_d128_e4m3, .file = "decode_sm90/decode_sm90", .kernel = "decode_sm90",
        .architecture = 90, .element = FA_ELEMENT_FLOAT16, .cache = FA_ELEMENT_FLOAT8_E4M3,
        .head_dim = 128, .options = 0, .group_rows = 8, .keys = 128, .stages = 4,
        .static_smem = 480, .blocks = 3)
VARIANT(decode_sm90_d128_e4m3_rows16, .file = "decode_sm90/decode_sm90", .kernel = "decode_sm90",
        .architecture = 90, .element = FA_ELEMENT_FLOAT16, .cache = FA_ELEMENT_FLOAT8_E4M3,
        .head_dim = 128, .options = 0, .group_rows = 16, .keys = 128, .stages = 6,
        .static_smem = 480, .blocks = 2)
VARIANT(decode_sm90_d256_e4m3, .file = "decode_sm90/decode_sm90", .kernel = "decode_sm90",
        .architecture = 90, .element = FA_ELEMENT_FLOAT16, .cache = FA_ELEMENT_FLOAT8_E4M3,
        .head_dim = 256, .options = 0, .group_rows = 8, .keys = 128, .stages = 6,
        .static_smem = 480, .blocks = 2)
VARIANT(decode_sm90_d128_int8, .file = "decode_sm90/decode_sm90", .kernel = "decode_sm90",
        .architecture = 90, .element = FA_ELEMENT_FLOAT16, .cache = FA_ELEMENT_INT8,
        .head_dim = 128, .options = 0, .group_rows = 8, .keys = 128, .stages = 4,
        .static_smem = 480, .blocks = 3)
VARIANT(decode_sm90_d128_int8_rows16, .file = "decode_sm90/decode_sm90", .kernel = "decode_sm90",
        .architecture = 90, .element = FA_ELEMENT_FLOAT16, .cache = FA_ELEMENT_INT8,
        .head_dim = 128, .options = 0, .group_rows = 16, .keys = 128, .stages = 6,
        .static_smem = 480, .blocks = 2)
VARIANT(decode_sm90_d256_int8, .file = "decode_sm90/decode_sm90", .kernel = "decode_sm90",
        .architecture = 90, .element = FA_ELEMENT_FLOAT16, .cache = FA_ELEMENT_INT8,
        .head_dim = 256, .options = 0, .group_rows = 8, .keys = 128, .stages = 6,
        .static_smem = 480, .blocks = 2)
END(decode, sm90)

/* For the sequences of few queries of a mixed batch, in persistent blocks. */
FAMILY(decode, sm90_persistent)
VARIANT_16BIT(decode_sm90_d128_persistent, .file = "decode_sm90/persistent",
              .kernel = "decode_sm90_persistent", .architecture = 90, .head_dim = 128, .options = 0,
              .group_rows = 8, .keys = 64, .stages = 4, .groups = 3, .blocks = 1)
END(decode, sm90_persistent)

/* Latent attention with many query heads. */
FAMILY(decode, latent_sm90)
VARIANT_16BIT(decode_latent_sm90, .file = "decode_latent_sm90/decode_latent_sm90",
              .kernel = "decode_latent_sm90", .architecture = 90, .head_dim = 576, .value_dim = 512,
              .options = 0, .group_rows = 64, .keys = 64, .stages = 10, .own_blocks = 5,
              .static_smem = 512)
END(decode, latent_sm90)

FAMILY(backward_prepare, sm90)
VARIANT_16BIT(backward_sm90_prepare_d64, .file = "backward_sm90/prepare",
              .kernel = "backward_sm90_prepare", .architecture = 90, .head_dim = 64)
VARIANT_16BIT(backward_sm90_prepare_d128, .file = "backward_sm90/prepare",
              .kernel = "backward_sm90_prepare", .architecture = 90, .head_dim = 128)
VARIANT_16BIT(backward_sm90_prepare_d192, .file = "backward_sm90/prepare",
              .kernel = "backward_sm90_prepare", .architecture = 90, .head_dim = 192)
VARIANT_16BIT(backward_sm90_prepare_d256, .file = "backward_sm90/prepare",
              .kernel = "backward_sm90_prepare", .architecture = 90, .head_dim = 256)
END(backward_prepare, sm90)

FAMILY(backward, sm90)
VARIANT_16BIT(backward_sm90_d64, .file = "backward_sm90/backward_sm90", .kernel = "backward_sm90",
              .architecture = 90, .head_dim = 64, .options = 0, .stages = 3)
/* Rows of 128 columns in shared memory, of which products take 96. The first one: where sums have one order. */
VARIANT_16BIT(backward_sm90_d96_ordered, .file = "backward_sm90/backward_sm90",
              .kernel = "backward_sm90", .architecture = 90, .head_dim = 128, .columns = 96,
              .options = 0, .stages = 3, .static_smem = 512, .ordered = 1)
VARIANT_16BIT(backward_sm90_d96, .file = "backward_sm90/backward_sm90", .kernel = "backward_sm90",
              .architecture = 90, .head_dim = 128, .columns = 96, .options = 0, .stages = 3,
              .static_smem = 512)
/* Where sums have one order. */
VARIANT_16BIT(backward_sm90_d128_ordered, .file = "backward_sm90/backward_sm90",
              .kernel = "backward_sm90", .architecture = 90, .head_dim = 128, .options = 0,
              .stages = 3, .static_smem = 512, .ordered = 1)
VARIANT_16BIT(backward_sm90_d128, .file = "backward_sm90/backward_sm90", .kernel = "backward_sm90",
              .architecture = 90, .head_dim = 128, .options = 0, .stages = 3, .static_smem = 512)
VARIANT_16BIT(backward_sm90_d64_softcap, .file = "backward_sm90/backward_sm90",
              .kernel = "backward_sm90", .architecture = 90, .head_dim = 64,
              .options = FA_SM90_SOFTCAP, .stages = 2)
VARIANT_16BIT(backward_sm90_d64_alibi, .file = "backward_sm90/backward_sm90",
              .kernel = "backward_sm90", .architecture = 90, .head_dim = 64,
              .options = FA_SM90_ALIBI, .stages = 2)
VARIANT_16BIT(backward_sm90_d64_dropout, .file = "backward_sm90/backward_sm90",
              .kernel = "backward_sm90", .architecture = 90, .head_dim = 64,
              .options = FA_SM90_DROPOUT, .stages = 2)
VARIANT_16BIT(backward_sm90_d128_softcap, .file = "backward_sm90/backward_sm90",
              .kernel = "backward_sm90", .architecture = 90, .head_dim = 128,
              .options = FA_SM90_SOFTCAP, .stages = 3, .static_smem = 512)
VARIANT_16BIT(backward_sm90_d128_alibi, .file = "backward_sm90/backward_sm90",
              .kernel = "backward_sm90", .architecture = 90, .head_dim = 128,
              .options = FA_SM90_ALIBI, .stages = 3, .static_smem = 512)
VARIANT_16BIT(backward_sm90_d128_dropout, .file = "backward_sm90/backward_sm90",
              .kernel = "backward_sm90", .architecture = 90, .head_dim = 128,
              .options = FA_SM90_DROPOUT, .stages = 3, .static_smem = 1024)
VARIANT_16BIT(backward_sm90_d64_bias, .file = "backward_sm90/backward_sm90",
              .kernel = "backward_sm90", .architecture = 90, .head_dim = 64,
              .options = FA_SM90_BIAS, .stages = 2)
VARIANT_16BIT(backward_sm90_d64_by_rows, .file = "backward_sm90/backward_sm90",
              .kernel = "backward_sm90", .architecture = 90, .head_dim = 64,
              .options = FA_SM90_BY_ROWS, .stages = 2)
VARIANT_16BIT(backward_sm90_general64, .file = "backward_sm90/backward_sm90",
              .kernel = "backward_sm90", .architecture = 90, .head_dim = 64, .options = FA_SM90_ALL,
              .stages = 2)
/* Two stages, for a tile of the bias. */
VARIANT_16BIT(backward_sm90_d128_bias, .file = "backward_sm90/backward_sm90",
              .kernel = "backward_sm90", .architecture = 90, .head_dim = 128,
              .options = FA_SM90_BIAS, .stages = 2, .static_smem = 768)
VARIANT_16BIT(backward_sm90_d128_by_rows, .file = "backward_sm90/backward_sm90",
              .kernel = "backward_sm90", .architecture = 90, .head_dim = 128,
              .options = FA_SM90_BY_ROWS, .stages = 2, .static_smem = 768)
VARIANT_16BIT(backward_sm90_general128, .file = "backward_sm90/backward_sm90",
              .kernel = "backward_sm90", .architecture = 90, .head_dim = 128,
              .options = FA_SM90_ALL, .stages = 3, .static_smem = 512)
VARIANT_16BIT(backward_sm90_d192_128_ordered, .file = "backward_sm90/backward_sm90",
              .kernel = "backward_sm90", .architecture = 90, .head_dim = 192, .value_dim = 128,
              .options = 0, .stages = 2, .static_smem = 512, .ordered = 1)
VARIANT_16BIT(backward_sm90_d192_128, .file = "backward_sm90/backward_sm90",
              .kernel = "backward_sm90", .architecture = 90, .head_dim = 192, .value_dim = 128,
              .options = 0, .stages = 2, .static_smem = 512)
VARIANT_16BIT(backward_sm90_wide_d192_ordered, .file = "backward_sm90_wide/backward_sm90_wide",
              .kernel = "backward_sm90_wide", .architecture = 90, .head_dim = 192, .value_dim = 192,
              .options = 0, .q_stages = 3, .stages = 1, .cluster = 2, .persistent = 1,
              .static_smem = 960, .ordered = 1)
/* In long rows, and in one round. */
VARIANT_16BIT(backward_sm90_wide_d192_turns, .file = "backward_sm90_wide/backward_sm90_wide",
              .kernel = "backward_sm90_wide", .architecture = 90, .head_dim = 192, .value_dim = 192,
              .options = 0, .q_stages = 3, .stages = 1, .cluster = 2, .ordered = 1)
VARIANT_16BIT(backward_sm90_wide_d192, .file = "backward_sm90_wide/backward_sm90_wide",
              .kernel = "backward_sm90_wide", .architecture = 90, .head_dim = 192, .value_dim = 192,
              .options = 0, .q_stages = 3, .stages = 1, .cluster = 2)
VARIANT_16BIT(backward_sm90_wide_d256_ordered, .file = "backward_sm90_wide/backward_sm90_wide",
              .kernel = "backward_sm90_wide", .architecture = 90, .head_dim = 256, .value_dim = 256,
              .options = 0, .q_stages = 2, .stages = 1, .cluster = 2, .static_smem = 512,
              .ordered = 1)
VARIANT_16BIT(backward_sm90_wide_d256, .file = "backward_sm90_wide/backward_sm90_wide",
              .kernel = "backward_sm90_wide", .architecture = 90, .head_dim = 256, .value_dim = 256,
              .options = 0, .q_stages = 2, .stages = 1, .cluster = 2, .static_smem = 512)
VARIANT_16BIT(backward_sm90_wide_d192_dropout, .file = "backward_sm90_wide/backward_sm90_wide",
              .kernel = "backward_sm90_wide", .architecture = 90, .head_dim = 192, .value_dim = 192,
              .options = FA_SM90_DROPOUT, .q_stages = 3, .stages = 1, .cluster = 2)
VARIANT_16BIT(backward_sm90_wide_d256_dropout, .file = "backward_sm90_wide/backward_sm90_wide",
              .kernel = "backward_sm90_wide", .architecture = 90, .head_dim = 256, .value_dim = 256,
              .options = FA_SM90_DROPOUT, .q_stages = 2, .stages = 1, .cluster = 2,
              .static_smem = 768)
VARIANT_16BIT(backward_sm90_wide_d192_softcap, .file = "backward_sm90_wide/backward_sm90_wide",
              .kernel = "backward_sm90_wide", .architecture = 90, .head_dim = 192, .value_dim = 192,
              .options = FA_SM90_SOFTCAP, .q_stages = 3, .stages = 1, .cluster = 2)
VARIANT_16BIT(backward_sm90_wide_d256_softcap, .file = "backward_sm90_wide/backward_sm90_wide",
              .kernel = "backward_sm90_wide", .architecture = 90, .head_dim = 256, .value_dim = 256,
              .options = FA_SM90_SOFTCAP, .q_stages = 2, .stages = 1, .cluster = 2,
              .static_smem = 512)
VARIANT_16BIT(backward_sm90_wide_d192_bias, .file = "backward_sm90_wide/backward_sm90_wide",
              .kernel = "backward_sm90_wide", .architecture = 90, .head_dim = 192, .value_dim = 192,
              .options = FA_SM90_BIAS, .q_stages = 3, .stages = 1, .cluster = 2)
VARIANT_16BIT(backward_sm90_wide_d256_bias, .file = "backward_sm90_wide/backward_sm90_wide",
              .kernel = "backward_sm90_wide", .architecture = 90, .head_dim = 256, .value_dim = 256,
              .options = FA_SM90_BIAS, .q_stages = 2, .stages = 1, .cluster = 2, .static_smem = 512)
VARIANT_16BIT(backward_sm90_wide_general192, .file = "backward_sm90_wide/backward_sm90_wide",
              .kernel = "backward_sm90_wide", .architecture = 90, .head_dim = 192, .value_dim = 192,
              .options = FA_SM90_ALL, .q_stages = 2, .stages = 2, .cluster = 2)
VARIANT_16BIT(backward_sm90_wide_general256, .file = "backward_sm90_wide/backward_sm90_wide",
              .kernel = "backward_sm90_wide", .architecture = 90, .head_dim = 256, .value_dim = 256,
              .options = FA_SM90_ALL, .q_stages = 2, .stages = 1, .cluster = 2, .static_smem = 512)
END(backward, sm90)

FAMILY(backward, sm90_persistent)
/* The same without options: blocks stay on their multiprocessor and take work tile after work tile.
 * Head dim 128 is for sums in any order. */
VARIANT_16BIT(backward_sm90_d64_ordered, .file = "backward_sm90/backward_sm90",
              .kernel = "backward_sm90", .architecture = 90, .head_dim = 64, .options = 0,
              .stages = 3, .static_smem = 1024, .ordered = 1, .persistent = 1, .dq_buffers = 3,
              .dq_transposed = 1)
VARIANT_16BIT(backward_sm90_d64_persistent, .file = "backward_sm90/backward_sm90",
              .kernel = "backward_sm90", .architecture = 90, .head_dim = 64, .options = 0,
              .stages = 3, .static_smem = 1024, .persistent = 1, .dq_buffers = 2,
              .dq_transposed = 1)
VARIANT_16BIT(backward_sm90_d128_persistent, .file = "backward_sm90/backward_sm90",
              .kernel = "backward_sm90", .architecture = 90, .head_dim = 128, .options = 0,
              .stages = 3, .static_smem = 1024, .persistent = 1)
END(backward, sm90_persistent)

/* The same for heads whose keys are one key tile: dQ is whole, and stored at once. */
FAMILY(backward, sm90_single)
VARIANT_16BIT(backward_sm90_d64_single, .file = "backward_sm90/backward_sm90",
              .kernel = "backward_sm90", .architecture = 90, .head_dim = 64, .options = 0,
              .stages = 3, .static_smem = 1024, .persistent = 1, .dq_buffers = 2,
              .dq_transposed = 1, .single_tiles = 1)
VARIANT_16BIT(backward_sm90_d128_single, .file = "backward_sm90/backward_sm90",
              .kernel = "backward_sm90", .architecture = 90, .head_dim = 128, .options = 0,
              .stages = 3, .static_smem = 1024, .persistent = 1, .single_tiles = 1)
END(backward, sm90_single)

/* The same for heads of a few key tiles, whose blocks are a cluster and pass sums of dQ on. */
FAMILY(backward, sm90_chained)
VARIANT_16BIT(backward_sm90_d64_chained, .file = "backward_sm90/backward_sm90",
              .kernel = "backward_sm90", .architecture = 90, .head_dim = 64, .options = 0,
              .stages = 3, .static_smem = 1024, .dq_buffers = 2, .dq_transposed = 1, .chained = 1)
VARIANT_16BIT(backward_sm90_d128_chained, .file = "backward_sm90/backward_sm90",
              .kernel = "backward_sm90", .architecture = 90, .head_dim = 128, .options = 0,
              .stages = 3, .static_smem = 512, .chained = 1)
END(backward, sm90_chained)

/* Where sums have one order, and the block with the last share of a query tile's dQ rounds the sum. */
FAMILY(backward, sm90_rounding)
VARIANT_16BIT(backward_sm90_d64_rounding, .file = "backward_sm90/backward_sm90",
              .kernel = "backward_sm90", .architecture = 90, .head_dim = 64, .options = 0,
              .stages = 3, .static_smem = 1024, .ordered = 1, .persistent = 1, .dq_buffers = 3,
              .dq_transposed = 1, .rounding = 2)
VARIANT_16BIT(backward_sm90_d96_rounding, .file = "backward_sm90/backward_sm90",
              .kernel = "backward_sm90", .architecture = 90, .head_dim = 128, .columns = 96,
              .options = 0, .stages = 3, .static_smem = 512, .ordered = 1, .rounding = 1)
VARIANT_16BIT(backward_sm90_d128_rounding, .file = "backward_sm90/backward_sm90",
              .kernel = "backward_sm90", .architecture = 90, .head_dim = 128, .options = 0,
              .stages = 3, .static_smem = 512, .ordered = 1, .rounding = 1)
/* Where query heads share keys. */
VARIANT_16BIT(backward_sm90_d96_rounding_group, .file = "backward_sm90/backward_sm90",
              .kernel = "backward_sm90", .architecture = 90, .head_dim = 128, .columns = 96,
              .options = 0, .stages = 3, .static_smem = 512, .ordered = 1, .rounding = 2)
VARIANT_16BIT(backward_sm90_d128_rounding_group, .file = "backward_sm90/backward_sm90",
              .kernel = "backward_sm90", .architecture = 90, .head_dim = 128, .options = 0,
              .stages = 3, .static_smem = 512, .ordered = 1, .rounding = 2)
END(backward, sm90_rounding)

/* The same, without options, with blocks that prepare and finish in the same launch. */
FAMILY(backward, sm90_joined)
VARIANT_16BIT(backward_sm90_d96_joined, .file = "backward_sm90/backward_sm90",
              .kernel = "backward_sm90", .architecture = 90, .head_dim = 128, .columns = 96,
              .options = 0, .stages = 3, .static_smem = 512, .joined = 1)
VARIANT_16BIT(backward_sm90_d128_joined, .file = "backward_sm90/backward_sm90",
              .kernel = "backward_sm90", .architecture = 90, .head_dim = 128, .options = 0,
              .stages = 3, .static_smem = 512, .joined = 1)
END(backward, sm90_joined)

FAMILY(backward_clear, sm90)
VARIANT(backward_sm90_clear, .file = "backward_sm90/clear", .kernel = "backward_sm90_clear",
        .architecture = 90, .element = FA_ELEMENT_FLOAT32)
END(backward_clear, sm90)

FAMILY(backward_finish, sm90)
VARIANT_16BIT(backward_sm90_finish_d64, .file = "backward_sm90/finish",
              .kernel = "backward_sm90_finish", .architecture = 90, .head_dim = 64)
VARIANT_16BIT(backward_sm90_finish_d128, .file = "backward_sm90/finish",
              .kernel = "backward_sm90_finish", .architecture = 90, .head_dim = 128)
VARIANT_16BIT(backward_sm90_finish_d192, .file = "backward_sm90/finish",
              .kernel = "backward_sm90_finish", .architecture = 90, .head_dim = 192)
VARIANT_16BIT(backward_sm90_finish_d256, .file = "backward_sm90/finish",
              .kernel = "backward_sm90_finish", .architecture = 90, .head_dim = 256)
END(backward_finish, sm90)

/* Where blocks leave their dS: the layout is that of every head dim. */
FAMILY(backward_dbias, sm90)
VARIANT_16BIT(backward_sm90_dbias, .file = "backward_sm90/dbias", .kernel = "backward_sm90_dbias",
              .architecture = 90, .head_dim = 64, .options = FA_SM90_BY_ROWS, .stages = 2)
END(backward_dbias, sm90)

/* Where blocks share keys. */
FAMILY(backward_finish_keys, sm90)
VARIANT_16BIT(backward_sm90_finish_keys, .file = "backward_sm90/finish_keys",
              .kernel = "backward_sm90_finish_keys", .architecture = 90)
END(backward_finish_keys, sm90)

FAMILY(backward_prepare, sm80)
VARIANT_16BIT(backward_sm80_prepare_d64, .file = "backward_sm80/prepare",
              .kernel = "backward_sm80_prepare", .architecture = 80, .head_dim = 64)
VARIANT_16BIT(backward_sm80_prepare_d96, .file = "backward_sm80/prepare",
              .kernel = "backward_sm80_prepare", .architecture = 80, .head_dim = 96)
VARIANT_16BIT(backward_sm80_prepare_d128, .file = "backward_sm80/prepare",
              .kernel = "backward_sm80_prepare", .architecture = 80, .head_dim = 128)
VARIANT_16BIT(backward_sm80_prepare_d192, .file = "backward_sm80/prepare",
              .kernel = "backward_sm80_prepare", .architecture = 80, .head_dim = 192)
VARIANT_16BIT(backward_sm80_prepare_d256, .file = "backward_sm80/prepare",
              .kernel = "backward_sm80_prepare", .architecture = 80, .head_dim = 256)
VARIANT_16BIT(backward_sm80_prepare_d512, .file = "backward_sm80/prepare",
              .kernel = "backward_sm80_prepare", .architecture = 80, .head_dim = 512)
END(backward_prepare, sm80)

FAMILY(backward, sm80)
VARIANT_16BIT(backward_sm80_d64, .file = "backward_sm80/backward_sm80", .kernel = "backward_sm80",
              .architecture = 80, .each_architecture = 1, .head_dim = 64, .options = 0, .warps = 4,
              .group_rows = 32, .keys = 128, .queries = 64, .stages = 2, .blocks = 2)
VARIANT_16BIT_SUFFIX(backward_sm80_d64, _general, .file = "backward_sm80/backward_sm80",
                     .kernel = "backward_sm80", .architecture = 80, .each_architecture = 1,
                     .head_dim = 64, .options = FA_BACKWARD_SM80_ALL, .warps = 4, .group_rows = 32,
                     .keys = 128, .queries = 64, .stages = 2, .blocks = 2)
/* For shared memory of 163 KiB (A100): two blocks of a multiprocessor. */
VARIANT_16BIT_SUFFIX(backward_sm80_d64, _small, .file = "backward_sm80/backward_sm80",
                     .kernel = "backward_sm80", .architecture = 80, .each_architecture = 1,
                     .head_dim = 64, .options = 0, .warps = 4, .group_rows = 32, .keys = 128,
                     .queries = 32, .stages = 2, .blocks = 2)
VARIANT_16BIT_SUFFIX(backward_sm80_d64, _small_general, .file = "backward_sm80/backward_sm80",
                     .kernel = "backward_sm80", .architecture = 80, .each_architecture = 1,
                     .head_dim = 64, .options = FA_BACKWARD_SM80_ALL, .warps = 4, .group_rows = 32,
                     .keys = 128, .queries = 32, .stages = 2, .blocks = 2)
VARIANT_16BIT(backward_sm80_d96, .file = "backward_sm80/backward_sm80", .kernel = "backward_sm80",
              .architecture = 80, .each_architecture = 1, .head_dim = 96, .options = 0, .warps = 8,
              .group_rows = 32, .keys = 128, .queries = 64, .stages = 2, .blocks = 1)
VARIANT_16BIT_SUFFIX(backward_sm80_d96, _general, .file = "backward_sm80/backward_sm80",
                     .kernel = "backward_sm80", .architecture = 80, .each_architecture = 1,
                     .head_dim = 96, .options = FA_BACKWARD_SM80_ALL, .warps = 8, .group_rows = 32,
                     .keys = 128, .queries = 64, .stages = 2, .blocks = 1)
/* For 163 KiB and 99 KiB; and for short rows. */
VARIANT_16BIT_SUFFIX(backward_sm80_d96, _small, .file = "backward_sm80/backward_sm80",
                     .kernel = "backward_sm80", .architecture = 80, .each_architecture = 1,
                     .head_dim = 96, .options = 0, .warps = 4, .group_rows = 32, .keys = 64,
                     .queries = 32, .stages = 2, .blocks = 2)
VARIANT_16BIT(backward_sm80_d128, .file = "backward_sm80/backward_sm80", .kernel = "backward_sm80",
              .architecture = 80, .each_architecture = 1, .head_dim = 128, .options = 0, .warps = 8,
              .group_rows = 32, .keys = 128, .queries = 64, .stages = 2, .blocks = 1)
VARIANT_16BIT_SUFFIX(backward_sm80_d128, _general, .file = "backward_sm80/backward_sm80",
                     .kernel = "backward_sm80", .architecture = 80, .each_architecture = 1,
                     .head_dim = 128, .options = FA_BACKWARD_SM80_ALL, .warps = 8, .group_rows = 32,
                     .keys = 128, .queries = 64, .stages = 2, .blocks = 1)
/* For 163 KiB, two blocks, and for 99 KiB (Ada). */
VARIANT_16BIT_SUFFIX(backward_sm80_d128, _small, .file = "backward_sm80/backward_sm80",
                     .kernel = "backward_sm80", .architecture = 80, .each_architecture = 1,
                     .head_dim = 128, .options = 0, .warps = 4, .group_rows = 32, .keys = 64,
                     .queries = 32, .stages = 2, .blocks = 2)
VARIANT_16BIT_SUFFIX(backward_sm80_d128, _small_general, .file = "backward_sm80/backward_sm80",
                     .kernel = "backward_sm80", .architecture = 80, .each_architecture = 1,
                     .head_dim = 128, .options = FA_BACKWARD_SM80_ALL, .warps = 4, .group_rows = 32,
                     .keys = 64, .queries = 32, .stages = 2, .blocks = 2)
VARIANT_16BIT(backward_sm80_d192, .file = "backward_sm80/backward_sm80", .kernel = "backward_sm80",
              .architecture = 80, .each_architecture = 1, .head_dim = 192, .options = 0, .warps = 8,
              .group_rows = 32, .keys = 64, .queries = 64, .stages = 2, .blocks = 1)
VARIANT_16BIT_SUFFIX(backward_sm80_d192, _general, .file = "backward_sm80/backward_sm80",
                     .kernel = "backward_sm80", .architecture = 80, .each_architecture = 1,
                     .head_dim = 192, .options = FA_BACKWARD_SM80_ALL, .warps = 8, .group_rows = 32,
                     .keys = 64, .queries = 64, .stages = 2, .blocks = 1)
VARIANT_16BIT(backward_sm80_d256, .file = "backward_sm80/backward_sm80", .kernel = "backward_sm80",
              .architecture = 80, .each_architecture = 1, .head_dim = 256, .options = 0, .warps = 8,
              .group_rows = 32, .keys = 64, .queries = 64, .stages = 2, .blocks = 1)
VARIANT_16BIT_SUFFIX(backward_sm80_d256, _general, .file = "backward_sm80/backward_sm80",
                     .kernel = "backward_sm80", .architecture = 80, .each_architecture = 1,
                     .head_dim = 256, .options = FA_BACKWARD_SM80_ALL, .warps = 8, .group_rows = 32,
                     .keys = 64, .queries = 64, .stages = 2, .blocks = 1)
/* For 163 KiB; then for 99 KiB. */
VARIANT_16BIT_SUFFIX(backward_sm80_d256, _small, .file = "backward_sm80/backward_sm80",
                     .kernel = "backward_sm80", .architecture = 80, .each_architecture = 1,
                     .head_dim = 256, .options = 0, .warps = 8, .group_rows = 32, .keys = 64,
                     .queries = 32, .stages = 2, .blocks = 1)
VARIANT_16BIT_SUFFIX(backward_sm80_d256, _small_general, .file = "backward_sm80/backward_sm80",
                     .kernel = "backward_sm80", .architecture = 80, .each_architecture = 1,
                     .head_dim = 256, .options = FA_BACKWARD_SM80_ALL, .warps = 8, .group_rows = 32,
                     .keys = 64, .queries = 32, .stages = 2, .blocks = 1)
VARIANT_16BIT_SUFFIX(backward_sm80_d256, _tiny_general, .file = "backward_sm80/backward_sm80",
                     .kernel = "backward_sm80", .architecture = 80, .each_architecture = 1,
                     .head_dim = 256, .options = FA_BACKWARD_SM80_ALL, .warps = 8, .group_rows = 16,
                     .keys = 32, .queries = 32, .stages = 1, .blocks = 1)
VARIANT_16BIT(backward_sm80_d512, .file = "backward_sm80/backward_sm80", .kernel = "backward_sm80",
              .architecture = 80, .each_architecture = 1, .head_dim = 512, .options = 0, .warps = 8,
              .group_rows = 16, .keys = 32, .queries = 32, .stages = 2, .blocks = 1)
VARIANT_16BIT_SUFFIX(backward_sm80_d512, _general, .file = "backward_sm80/backward_sm80",
                     .kernel = "backward_sm80", .architecture = 80, .each_architecture = 1,
                     .head_dim = 512, .options = FA_BACKWARD_SM80_ALL, .warps = 8, .group_rows = 16,
                     .keys = 32, .queries = 32, .stages = 2, .blocks = 1)
/* For 163 KiB. */
VARIANT_16BIT_SUFFIX(backward_sm80_d512, _small_general, .file = "backward_sm80/backward_sm80",
                     .kernel = "backward_sm80", .architecture = 80, .each_architecture = 1,
                     .head_dim = 512, .options = FA_BACKWARD_SM80_ALL, .warps = 8, .group_rows = 16,
                     .keys = 32, .queries = 32, .stages = 1, .blocks = 1)
END(backward, sm80)

FAMILY(backward_finish, sm80)
VARIANT_16BIT(backward_sm80_finish_d64, .file = "backward_sm80/finish",
              .kernel = "backward_sm80_finish", .architecture = 80, .each_architecture = 1,
              .head_dim = 64)
VARIANT_16BIT(backward_sm80_finish_d96, .file = "backward_sm80/finish",
              .kernel = "backward_sm80_finish", .architecture = 80, .each_architecture = 1,
              .head_dim = 96)
VARIANT_16BIT(backward_sm80_finish_d128, .file = "backward_sm80/finish",
              .kernel = "backward_sm80_finish", .architecture = 80, .each_architecture = 1,
              .head_dim = 128)
VARIANT_16BIT(backward_sm80_finish_d192, .file = "backward_sm80/finish",
              .kernel = "backward_sm80_finish", .architecture = 80, .each_architecture = 1,
              .head_dim = 192)
VARIANT_16BIT(backward_sm80_finish_d256, .file = "backward_sm80/finish",
              .kernel = "backward_sm80_finish", .architecture = 80, .each_architecture = 1,
              .head_dim = 256)
VARIANT_16BIT(backward_sm80_finish_d512, .file = "backward_sm80/finish",
              .kernel = "backward_sm80_finish", .architecture = 80, .each_architecture = 1,
              .head_dim = 512)
END(backward_finish, sm80)

/* The same source for float32 inputs whose products may be rounded to tf32. */
FAMILY(backward_prepare, tf32)
VARIANT(backward_tf32_prepare_d64, .file = "backward_sm80/prepare",
        .kernel = "backward_sm80_prepare", .architecture = 80, .element = FA_ELEMENT_TF32,
        .head_dim = 64)
VARIANT(backward_tf32_prepare_d128, .file = "backward_sm80/prepare",
        .kernel = "backward_sm80_prepare", .architecture = 80, .element = FA_ELEMENT_TF32,
        .head_dim = 128)
VARIANT(backward_tf32_prepare_d256, .file = "backward_sm80/prepare",
        .kernel = "backward_sm80_prepare", .architecture = 80, .element = FA_ELEMENT_TF32,
        .head_dim = 256)
VARIANT(backward_tf32_prepare_d320, .file = "backward_sm80/prepare",
        .kernel = "backward_sm80_prepare", .architecture = 80, .each_architecture = 1,
        .element = FA_ELEMENT_TF32, .head_dim = 320)
VARIANT(backward_tf32_prepare_d384, .file = "backward_sm80/prepare",
        .kernel = "backward_sm80_prepare", .architecture = 80, .each_architecture = 1,
        .element = FA_ELEMENT_TF32, .head_dim = 384)
VARIANT(backward_tf32_prepare_d512, .file = "backward_sm80/prepare",
        .kernel = "backward_sm80_prepare", .architecture = 80, .each_architecture = 1,
        .element = FA_ELEMENT_TF32, .head_dim = 512)
END(backward_prepare, tf32)

FAMILY(backward, tf32)
/* For short sequences, of which smaller key tiles compute fewer hidden pairs: three blocks of a multiprocessor. */
VARIANT(backward_tf32_d64_short, .file = "backward_sm80/backward_sm80", .kernel = "backward_sm80",
        .architecture = 80, .each_architecture = 1, .element = FA_ELEMENT_TF32, .head_dim = 64,
        .options = 0, .short_rows = 1, .warps = 4, .group_rows = 16, .keys = 64, .queries = 32,
        .stages = 2, .blocks = 3)
VARIANT(backward_tf32_d64, .file = "backward_sm80/backward_sm80", .kernel = "backward_sm80",
        .architecture = 80, .each_architecture = 1, .element = FA_ELEMENT_TF32, .head_dim = 64,
        .options = 0, .warps = 4, .group_rows = 32, .keys = 128, .queries = 32, .stages = 2,
        .blocks = 2)
VARIANT(backward_tf32_d64_bias, .file = "backward_sm80/backward_sm80", .kernel = "backward_sm80",
        .architecture = 80, .each_architecture = 1, .element = FA_ELEMENT_TF32, .head_dim = 64,
        .options = FA_BACKWARD_SM80_BIAS, .warps = 4, .group_rows = 32, .keys = 128, .queries = 32,
        .stages = 2, .blocks = 2)
VARIANT(backward_tf32_d64_general, .file = "backward_sm80/backward_sm80", .kernel = "backward_sm80",
        .architecture = 80, .each_architecture = 1, .element = FA_ELEMENT_TF32, .head_dim = 64,
        .options = FA_BACKWARD_SM80_ALL, .warps = 4, .group_rows = 32, .keys = 128, .queries = 32,
        .stages = 2, .blocks = 2)
/* For shared memory of 163 KiB (A100): two blocks of a multiprocessor. */
VARIANT(backward_tf32_d64_small, .file = "backward_sm80/backward_sm80", .kernel = "backward_sm80",
        .architecture = 80, .each_architecture = 1, .element = FA_ELEMENT_TF32, .head_dim = 64,
        .options = 0, .warps = 4, .group_rows = 16, .keys = 64, .queries = 32, .stages = 2,
        .blocks = 2)
VARIANT(backward_tf32_d64_small_general, .file = "backward_sm80/backward_sm80",
        .kernel = "backward_sm80", .architecture = 80, .each_architecture = 1,
        .element = FA_ELEMENT_TF32, .head_dim = 64, .options = FA_BACKWARD_SM80_ALL, .warps = 4,
        .group_rows = 16, .keys = 64, .queries = 32, .stages = 2, .blocks = 2)
VARIANT(backward_tf32_d128_short, .file = "backward_sm80/backward_sm80", .kernel = "backward_sm80",
        .architecture = 80, .each_architecture = 1, .element = FA_ELEMENT_TF32, .head_dim = 128,
        .options = 0, .short_rows = 1, .warps = 4, .group_rows = 16, .keys = 64, .queries = 32,
        .stages = 2, .blocks = 2)
VARIANT(backward_tf32_d128, .file = "backward_sm80/backward_sm80", .kernel = "backward_sm80",
        .architecture = 80, .each_architecture = 1, .element = FA_ELEMENT_TF32, .head_dim = 128,
        .options = 0, .warps = 8, .group_rows = 16, .keys = 128, .queries = 32, .stages = 2,
        .blocks = 1)
VARIANT(backward_tf32_d128_bias, .file = "backward_sm80/backward_sm80",
        .kernel = "backward_sm80", .architecture = 80, .each_architecture = 1,
        .element = FA_ELEMENT_TF32, .head_dim = 128, .options = FA_BACKWARD_SM80_BIAS, .warps = 8,
        .group_rows = 16, .keys = 128, .queries = 32, .stages = 2, .blocks = 1)
VARIANT(backward_tf32_d128_general, .file = "backward_sm80/backward_sm80",
        .kernel = "backward_sm80", .architecture = 80, .each_architecture = 1,
        .element = FA_ELEMENT_TF32, .head_dim = 128, .options = FA_BACKWARD_SM80_ALL, .warps = 8,
        .group_rows = 16, .keys = 128, .queries = 32, .stages = 2, .blocks = 1)
/* For 163 KiB; then for 99 KiB (Ada, consumer Ampere). */
VARIANT(backward_tf32_d128_small, .file = "backward_sm80/backward_sm80", .kernel = "backward_sm80",
        .architecture = 80, .each_architecture = 1, .element = FA_ELEMENT_TF32, .head_dim = 128,
        .options = 0, .warps = 8, .group_rows = 16, .keys = 64, .queries = 32, .stages = 2,
        .blocks = 1)
VARIANT(backward_tf32_d128_small_general, .file = "backward_sm80/backward_sm80",
        .kernel = "backward_sm80", .architecture = 80, .each_architecture = 1,
        .element = FA_ELEMENT_TF32, .head_dim = 128, .options = FA_BACKWARD_SM80_ALL, .warps = 8,
        .group_rows = 16, .keys = 64, .queries = 32, .stages = 2, .blocks = 1)
VARIANT(backward_tf32_d128_tiny_general, .file = "backward_sm80/backward_sm80",
        .kernel = "backward_sm80", .architecture = 80, .each_architecture = 1,
        .element = FA_ELEMENT_TF32, .head_dim = 128, .options = FA_BACKWARD_SM80_ALL, .warps = 4,
        .group_rows = 16, .keys = 32, .queries = 32, .stages = 2, .blocks = 1)
VARIANT(backward_tf32_d256, .file = "backward_sm80/backward_sm80", .kernel = "backward_sm80",
        .architecture = 80, .each_architecture = 1, .element = FA_ELEMENT_TF32, .head_dim = 256,
        .options = 0, .warps = 8, .group_rows = 16, .keys = 64, .queries = 32, .stages = 2,
        .blocks = 1)
VARIANT(backward_tf32_d256_general, .file = "backward_sm80/backward_sm80",
        .kernel = "backward_sm80", .architecture = 80, .each_architecture = 1,
        .element = FA_ELEMENT_TF32, .head_dim = 256, .options = FA_BACKWARD_SM80_ALL, .warps = 8,
        .group_rows = 16, .keys = 64, .queries = 32, .stages = 2, .blocks = 1)
/* For 163 KiB. */
VARIANT(backward_tf32_d256_small_general, .file = "backward_sm80/backward_sm80",
        .kernel = "backward_sm80", .architecture = 80, .each_architecture = 1,
        .element = FA_ELEMENT_TF32, .head_dim = 256, .options = FA_BACKWARD_SM80_ALL, .warps = 4,
        .group_rows = 16, .keys = 32, .queries = 32, .stages = 2, .blocks = 1)
/* Warps share the products of scores. For 227 KiB (Hopper). */
VARIANT(backward_tf32_d320, .file = "backward_sm80/backward_sm80", .kernel = "backward_sm80",
        .architecture = 80, .each_architecture = 1, .element = FA_ELEMENT_TF32, .head_dim = 320,
        .options = 0, .warps = 8, .group_rows = 32, .keys = 64, .queries = 32, .stages = 1,
        .slices = 2, .blocks = 1)
VARIANT(backward_tf32_d384, .file = "backward_sm80/backward_sm80", .kernel = "backward_sm80",
        .architecture = 80, .each_architecture = 1, .element = FA_ELEMENT_TF32, .head_dim = 384,
        .options = 0, .warps = 12, .group_rows = 32, .keys = 32, .queries = 32, .stages = 1,
        .slices = 3, .blocks = 1)
VARIANT(backward_tf32_d384_general, .file = "backward_sm80/backward_sm80",
        .kernel = "backward_sm80", .architecture = 80, .each_architecture = 1,
        .element = FA_ELEMENT_TF32, .head_dim = 384, .options = FA_BACKWARD_SM80_ALL, .warps = 12,
        .group_rows = 32, .keys = 32, .queries = 32, .stages = 1, .slices = 3, .blocks = 1)
VARIANT(backward_tf32_d512, .file = "backward_sm80/backward_sm80", .kernel = "backward_sm80",
        .architecture = 80, .each_architecture = 1, .element = FA_ELEMENT_TF32, .head_dim = 512,
        .options = 0, .warps = 8, .group_rows = 32, .keys = 32, .queries = 32, .stages = 1,
        .slices = 4, .static_smem = 512, .blocks = 1)
VARIANT(backward_tf32_d512_general, .file = "backward_sm80/backward_sm80",
        .kernel = "backward_sm80", .architecture = 80, .each_architecture = 1,
        .element = FA_ELEMENT_TF32, .head_dim = 512, .options = FA_BACKWARD_SM80_ALL, .warps = 8,
        .group_rows = 32, .keys = 32, .queries = 32, .stages = 1, .slices = 4, .static_smem = 512,
        .blocks = 1)
END(backward, tf32)

FAMILY(backward, tf32x3)
/* Three products in float16 for each of float32. The launches around it are those of tf32. */
VARIANT(backward_tf32x3_d64, .file = "backward_sm80/backward_sm80", .kernel = "backward_sm80",
        .architecture = 80, .each_architecture = 1, .element = FA_ELEMENT_TF32X3, .head_dim = 64,
        .options = 0, .warps = 4, .group_rows = 16, .keys = 64, .queries = 32, .stages = 1,
        .blocks = 2)
VARIANT(backward_tf32x3_d64_bias, .file = "backward_sm80/backward_sm80",
        .kernel = "backward_sm80", .architecture = 80, .each_architecture = 1,
        .element = FA_ELEMENT_TF32X3, .head_dim = 64, .options = FA_BACKWARD_SM80_BIAS, .warps = 4,
        .group_rows = 16, .keys = 64, .queries = 32, .stages = 1, .blocks = 2)
VARIANT(backward_tf32x3_d64_general, .file = "backward_sm80/backward_sm80",
        .kernel = "backward_sm80", .architecture = 80, .each_architecture = 1,
        .element = FA_ELEMENT_TF32X3, .head_dim = 64, .options = FA_BACKWARD_SM80_ALL, .warps = 4,
        .group_rows = 16, .keys = 64, .queries = 32, .stages = 1, .blocks = 2)
VARIANT(backward_tf32x3_d128, .file = "backward_sm80/backward_sm80", .kernel = "backward_sm80",
        .architecture = 80, .each_architecture = 1, .element = FA_ELEMENT_TF32X3, .head_dim = 128,
        .options = 0, .warps = 4, .group_rows = 16, .keys = 64, .queries = 32, .stages = 1,
        .blocks = 2)
VARIANT(backward_tf32x3_d128_bias, .file = "backward_sm80/backward_sm80",
        .kernel = "backward_sm80", .architecture = 80, .each_architecture = 1,
        .element = FA_ELEMENT_TF32X3, .head_dim = 128, .options = FA_BACKWARD_SM80_BIAS, .warps = 4,
        .group_rows = 16, .keys = 64, .queries = 32, .stages = 1, .blocks = 2)
VARIANT(backward_tf32x3_d128_general, .file = "backward_sm80/backward_sm80",
        .kernel = "backward_sm80", .architecture = 80, .each_architecture = 1,
        .element = FA_ELEMENT_TF32X3, .head_dim = 128, .options = FA_BACKWARD_SM80_ALL, .warps = 4,
        .group_rows = 16, .keys = 64, .queries = 32, .stages = 1, .blocks = 2)
/* For 163 KiB: eight warps of a multiprocessor, too. */
VARIANT(backward_tf32x3_d128_small_general, .file = "backward_sm80/backward_sm80",
        .kernel = "backward_sm80", .architecture = 80, .each_architecture = 1,
        .element = FA_ELEMENT_TF32X3, .head_dim = 128, .options = FA_BACKWARD_SM80_ALL, .warps = 8,
        .group_rows = 16, .keys = 64, .queries = 32, .stages = 1, .blocks = 1)
VARIANT(backward_tf32x3_d256, .file = "backward_sm80/backward_sm80", .kernel = "backward_sm80",
        .architecture = 80, .each_architecture = 1, .element = FA_ELEMENT_TF32X3, .head_dim = 256,
        .options = 0, .warps = 8, .group_rows = 16, .keys = 64, .queries = 32, .stages = 1,
        .blocks = 1)
VARIANT(backward_tf32x3_d256_general, .file = "backward_sm80/backward_sm80",
        .kernel = "backward_sm80", .architecture = 80, .each_architecture = 1,
        .element = FA_ELEMENT_TF32X3, .head_dim = 256, .options = FA_BACKWARD_SM80_ALL, .warps = 8,
        .group_rows = 16, .keys = 64, .queries = 32, .stages = 1, .blocks = 1)
/* For 163 KiB. */
VARIANT(backward_tf32x3_d256_small_general, .file = "backward_sm80/backward_sm80",
        .kernel = "backward_sm80", .architecture = 80, .each_architecture = 1,
        .element = FA_ELEMENT_TF32X3, .head_dim = 256, .options = FA_BACKWARD_SM80_ALL, .warps = 4,
        .group_rows = 16, .keys = 32, .queries = 32, .stages = 1, .blocks = 1)
/* Warps share the products of scores. For 227 KiB (Hopper). */
VARIANT(backward_tf32x3_d384, .file = "backward_sm80/backward_sm80", .kernel = "backward_sm80",
        .architecture = 80, .each_architecture = 1, .element = FA_ELEMENT_TF32X3, .head_dim = 384,
        .options = 0, .warps = 12, .group_rows = 32, .keys = 32, .queries = 32, .stages = 1,
        .slices = 3, .blocks = 1)
VARIANT(backward_tf32x3_d384_general, .file = "backward_sm80/backward_sm80",
        .kernel = "backward_sm80", .architecture = 80, .each_architecture = 1,
        .element = FA_ELEMENT_TF32X3, .head_dim = 384, .options = FA_BACKWARD_SM80_ALL, .warps = 12,
        .group_rows = 32, .keys = 32, .queries = 32, .stages = 1, .slices = 3, .blocks = 1)
VARIANT(backward_tf32x3_d512, .file = "backward_sm80/backward_sm80", .kernel = "backward_sm80",
        .architecture = 80, .each_architecture = 1, .element = FA_ELEMENT_TF32X3, .head_dim = 512,
        .options = 0, .warps = 8, .group_rows = 32, .keys = 32, .queries = 16, .stages = 1,
        .slices = 4, .blocks = 1)
VARIANT(backward_tf32x3_d512_general, .file = "backward_sm80/backward_sm80",
        .kernel = "backward_sm80", .architecture = 80, .each_architecture = 1,
        .element = FA_ELEMENT_TF32X3, .head_dim = 512, .options = FA_BACKWARD_SM80_ALL, .warps = 8,
        .group_rows = 32, .keys = 32, .queries = 16, .stages = 1, .slices = 4, .blocks = 1)
END(backward, tf32x3)

/* Where blocks share keys. Of all types. */
FAMILY(backward_finish_keys, sm80)
VARIANT(backward_sm80_finish_keys, .file = "backward_sm80/finish_keys",
        .kernel = "backward_sm80_finish_keys", .architecture = 80)
END(backward_finish_keys, sm80)

FAMILY(backward_weight_sums, tf32x3)
/* Each serves the kernels of the same head dim and options. */
VARIANT(backward_tf32x3_weight_sums_d64, .file = "backward_sm80/weight_sums",
        .kernel = "backward_sm80_weight_sums", .architecture = 80, .each_architecture = 1,
        .element = FA_ELEMENT_TF32X3, .head_dim = 64, .options = 0, .warps = 4, .group_rows = 32,
        .keys = 64, .queries = 64, .stages = 1, .blocks = 3)
VARIANT(backward_tf32x3_weight_sums_d64_general, .file = "backward_sm80/weight_sums",
        .kernel = "backward_sm80_weight_sums", .architecture = 80, .each_architecture = 1,
        .element = FA_ELEMENT_TF32X3, .head_dim = 64, .options = FA_BACKWARD_SM80_ALL, .warps = 4,
        .group_rows = 32, .keys = 64, .queries = 64, .stages = 1, .blocks = 2)
VARIANT(backward_tf32x3_weight_sums_d128, .file = "backward_sm80/weight_sums",
        .kernel = "backward_sm80_weight_sums", .architecture = 80, .each_architecture = 1,
        .element = FA_ELEMENT_TF32X3, .head_dim = 128, .options = 0, .warps = 4, .group_rows = 32,
        .keys = 64, .queries = 64, .stages = 1, .blocks = 2)
VARIANT(backward_tf32x3_weight_sums_d128_general, .file = "backward_sm80/weight_sums",
        .kernel = "backward_sm80_weight_sums", .architecture = 80, .each_architecture = 1,
        .element = FA_ELEMENT_TF32X3, .head_dim = 128, .options = FA_BACKWARD_SM80_ALL, .warps = 4,
        .group_rows = 32, .keys = 64, .queries = 64, .stages = 1, .blocks = 2)
VARIANT(backward_tf32x3_weight_sums_d256, .file = "backward_sm80/weight_sums",
        .kernel = "backward_sm80_weight_sums", .architecture = 80, .each_architecture = 1,
        .element = FA_ELEMENT_TF32X3, .head_dim = 256, .options = 0, .warps = 8, .group_rows = 32,
        .keys = 64, .queries = 64, .stages = 1, .blocks = 1)
/* For 163 KiB, too. */
VARIANT(backward_tf32x3_weight_sums_d256_general, .file = "backward_sm80/weight_sums",
        .kernel = "backward_sm80_weight_sums", .architecture = 80, .each_architecture = 1,
        .element = FA_ELEMENT_TF32X3, .head_dim = 256, .options = FA_BACKWARD_SM80_ALL, .warps = 8,
        .group_rows = 16, .keys = 32, .queries = 64, .stages = 1, .blocks = 1)
VARIANT(backward_tf32x3_weight_sums_d384, .file = "backward_sm80/weight_sums",
        .kernel = "backward_sm80_weight_sums", .architecture = 80, .each_architecture = 1,
        .element = FA_ELEMENT_TF32X3, .head_dim = 384, .options = 0, .warps = 8, .group_rows = 16,
        .keys = 32, .queries = 64, .stages = 1, .slices = 3, .blocks = 1)
VARIANT(backward_tf32x3_weight_sums_d384_general, .file = "backward_sm80/weight_sums",
        .kernel = "backward_sm80_weight_sums", .architecture = 80, .each_architecture = 1,
        .element = FA_ELEMENT_TF32X3, .head_dim = 384, .options = FA_BACKWARD_SM80_ALL, .warps = 8,
        .group_rows = 16, .keys = 32, .queries = 64, .stages = 1, .slices = 3, .blocks = 1)
VARIANT(backward_tf32x3_weight_sums_d512, .file = "backward_sm80/weight_sums",
        .kernel = "backward_sm80_weight_sums", .architecture = 80, .each_architecture = 1,
        .element = FA_ELEMENT_TF32X3, .head_dim = 512, .options = 0, .warps = 8, .group_rows = 16,
        .keys = 32, .queries = 32, .stages = 1, .slices = 4, .blocks = 1)
VARIANT(backward_tf32x3_weight_sums_d512_general, .file = "backward_sm80/weight_sums",
        .kernel = "backward_sm80_weight_sums", .architecture = 80, .each_architecture = 1,
        .element = FA_ELEMENT_TF32X3, .head_dim = 512, .options = FA_BACKWARD_SM80_ALL, .warps = 8,
        .group_rows = 16, .keys = 32, .queries = 32, .stages = 1, .slices = 4, .blocks = 1)
END(backward_weight_sums, tf32x3)

FAMILY(backward_finish, tf32)
VARIANT(backward_tf32_finish_d64, .file = "backward_sm80/finish", .kernel = "backward_sm80_finish",
        .architecture = 80, .each_architecture = 1, .element = FA_ELEMENT_TF32, .head_dim = 64)
VARIANT(backward_tf32_finish_d128, .file = "backward_sm80/finish", .kernel = "backward_sm80_finish",
        .architecture = 80, .each_architecture = 1, .element = FA_ELEMENT_TF32, .head_dim = 128)
VARIANT(backward_tf32_finish_d256, .file = "backward_sm80/finish", .kernel = "backward_sm80_finish",
        .architecture = 80, .each_architecture = 1, .element = FA_ELEMENT_TF32, .head_dim = 256)
VARIANT(backward_tf32_finish_d320, .file = "backward_sm80/finish", .kernel = "backward_sm80_finish",
        .architecture = 80, .each_architecture = 1, .element = FA_ELEMENT_TF32, .head_dim = 320)
VARIANT(backward_tf32_finish_d384, .file = "backward_sm80/finish", .kernel = "backward_sm80_finish",
        .architecture = 80, .each_architecture = 1, .element = FA_ELEMENT_TF32, .head_dim = 384)
VARIANT(backward_tf32_finish_d512, .file = "backward_sm80/finish", .kernel = "backward_sm80_finish",
        .architecture = 80, .each_architecture = 1, .element = FA_ELEMENT_TF32, .head_dim = 512)
END(backward_finish, tf32)

FAMILY(backward_delta, simt)
VARIANT(backward_delta, .file = "backward_simt/delta", .kernel = "backward_delta",
        .architecture = 75, .element = FA_ELEMENT_FLOAT32)
END(backward_delta, simt)

FAMILY(backward_dq, simt)
VARIANT(backward_dq_simt_d64, .file = "backward_simt/dq", .kernel = "backward_dq_simt",
        .architecture = 75, .element = FA_ELEMENT_FLOAT32, .head_dim = 64, .own = 64)
VARIANT(backward_dq_simt_d128, .file = "backward_simt/dq", .kernel = "backward_dq_simt",
        .architecture = 75, .element = FA_ELEMENT_FLOAT32, .head_dim = 128, .own = 64)
VARIANT(backward_dq_simt_d256, .file = "backward_simt/dq", .kernel = "backward_dq_simt",
        .architecture = 75, .element = FA_ELEMENT_FLOAT32, .head_dim = 256, .own = 64)
VARIANT(backward_dq_simt_d512, .file = "backward_simt/dq", .kernel = "backward_dq_simt",
        .architecture = 75, .element = FA_ELEMENT_FLOAT32, .head_dim = 512, .own = 32)
END(backward_dq, simt)

FAMILY(backward_dkv, simt)
VARIANT(backward_dkv_simt_d64, .file = "backward_simt/dkv", .kernel = "backward_dkv_simt",
        .architecture = 75, .element = FA_ELEMENT_FLOAT32, .head_dim = 64, .own = 64)
VARIANT(backward_dkv_simt_d128, .file = "backward_simt/dkv", .kernel = "backward_dkv_simt",
        .architecture = 75, .element = FA_ELEMENT_FLOAT32, .head_dim = 128, .own = 64)
VARIANT(backward_dkv_simt_d256, .file = "backward_simt/dkv", .kernel = "backward_dkv_simt",
        .architecture = 75, .element = FA_ELEMENT_FLOAT32, .head_dim = 256, .own = 32)
VARIANT(backward_dkv_simt_d512, .file = "backward_simt/dkv", .kernel = "backward_dkv_simt",
        .architecture = 75, .element = FA_ELEMENT_FLOAT32, .head_dim = 512, .own = 16)
END(backward_dkv, simt)

FAMILY(backward_dbias, simt)
VARIANT(backward_dbias_simt, .file = "backward_simt/dbias", .kernel = "backward_dbias_simt",
        .architecture = 75, .element = FA_ELEMENT_FLOAT32, .own = 64)
END(backward_dbias, simt)

/* Where the kernel of the other gradients makes dbias. */
FAMILY(backward_dbias_clear, simt)
VARIANT(backward_dbias_clear, .file = "backward_simt/dbias_clear", .kernel = "backward_dbias_clear",
        .architecture = 75, .element = FA_ELEMENT_FLOAT32)
END(backward_dbias_clear, simt)

FAMILY(backward_dbias_round, simt)
VARIANT(backward_dbias_round, .file = "backward_simt/dbias_round", .kernel = "backward_dbias_round",
        .architecture = 75, .element = FA_ELEMENT_FLOAT32)
END(backward_dbias_round, simt)

FAMILY(backward_dsinks, simt)
VARIANT(backward_dsinks, .file = "backward_simt/dsinks", .kernel = "backward_dsinks",
        .architecture = 75, .element = FA_ELEMENT_FLOAT32)
END(backward_dsinks, simt)

FAMILY(weights, simt)
VARIANT(weights_simt, .file = "weights_simt/weights_simt", .kernel = "weights_simt",
        .architecture = 75, .element = FA_ELEMENT_FLOAT32, .own = 64)
END(weights, simt)

FAMILY(combine, simt)
/* Parameters of a kernel end at 4 KiB; from CUDA 12.1 on at 32764 bytes. */
VARIANT(combine_few, .file = "combine/combine", .kernel = "combine", .architecture = 75,
        .element = FA_ELEMENT_FLOAT32, .max_parts = FA_COMBINE_FEW)
VARIANT(combine_many, .file = "combine/combine", .kernel = "combine", .architecture = 75,
        .element = FA_ELEMENT_FLOAT32, .max_parts = FA_COMBINE_MANY)
END(combine, simt)

FAMILY(append, simt)
VARIANT(append_simt, .file = "append/append", .kernel = "append_simt", .architecture = 75,
        .element = FA_ELEMENT_FLOAT32)
END(append, simt)

FAMILY(check, simt)
VARIANT(check_simt, .file = "check/check", .kernel = "check_simt", .architecture = 75,
        .element = FA_ELEMENT_FLOAT32)
END(check, simt)

#undef VARIANT_16BIT
#undef VARIANT_16BIT_SUFFIX
