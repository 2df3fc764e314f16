/*
 * Converts between .npy arrays and the library's tensors: axes, layouts and dtypes.
 */
#ifndef FA_CLI_TENSORS_H
#define FA_CLI_TENSORS_H

#include "flashattn.h"
#include "npy.h"

/* The order of the axes of a 4-D array. A 3-D array has no batch axis, and a 2-D array (sequence,
 * dim) no heads axis either: their extents are 1. */
typedef enum cli_layout {
    CLI_BSHD = 0,  /* (batch, sequence, heads, dim) */
    CLI_BHSD = 1,  /* (batch, heads, sequence, dim) */
    CLI_SCORES = 2 /* (batch, head, query, key): bias, mask and dbias, with any --layout */
} cli_layout;

/* Names for CLI_CHOICE options, in the order of cli_layout, fa_dtype and fa_device. */
extern const char *const CLI_LAYOUT_NAMES[];
extern const char *const CLI_DTYPE_NAMES[];
extern const char *const CLI_PRECISION_NAMES[]; /* by fa_precision */
extern const char *const CLI_DEVICE_NAMES[];

/* A tensor that owns its memory. */
typedef struct cli_tensor {
    fa_tensor view; /* axes (batch, sequence, head, dim); CLI_SCORES: (batch, head, query, key) */
    int axes;       /* the number of axes in the file: the last ones of its layout */
    cli_layout layout;
} cli_tensor;

/* Those of the following functions that return bool print an error message on stderr. option
 * ("--q") and path are for the messages. */

/* A new tensor; its memory is not initialized. With CLI_SCORES the extents are those of
 * (batch, head, query, key). */
bool cli_tensor_new(cli_tensor *t, int axes, cli_layout layout, fa_dtype dtype, int64_t batch,
                    int64_t sequence, int64_t heads, int64_t dim);
void cli_tensor_free(cli_tensor *t);

/* Reads a .npy file. */
bool cli_read_array(const char *option, const char *path, npy_array *array);

/* From a float array with 2 to 4 axes, rounded once to dtype. Consumes the array. */
bool cli_tensor_take(cli_tensor *t, npy_array *array, const char *option, const char *path,
                     cli_layout layout, fa_dtype dtype);

/* The dtype in which floats of a file are computed by default: float16 and bfloat16 stay, others
 * become float32. */
fa_dtype cli_dtype_of(npy_type type);

/* From an array with the axes ([[batch,] head,] query, key): floats in the file's own dtype; if
 * mask is set, bool or integers, to FA_BOOL. Consumes the array. */
bool cli_tensor_take_scores(cli_tensor *t, npy_array *array, const char *option, const char *path,
                            bool mask);

/* A new float32 array from count floats of the file's array, whose last axis must be heads; NULL on
 * failure. Consumes the array. */
float *cli_floats_take(npy_array *array, const char *option, const char *path, int64_t heads);

/* A new array of the file's integers, which must fit in 32 bits; NULL on failure. */
int32_t *cli_integers_take(const npy_array *array, const char *option, const char *path);

/* The array to write for a tensor: its axes and layout, float16 for float16, otherwise float32. The
 * array takes over the tensor's memory (bfloat16: a new one). */
bool cli_tensor_to_array(cli_tensor *t, npy_array *array);

#endif
