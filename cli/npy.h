/*
 * Reading and writing NumPy's .npy files (format versions 1.0, 2.0 and 3.0).
 *
 * An array in memory is always in C order (last axis fastest) and in this machine's byte order,
 * whatever the file has. Files are written completely or not at all: each is written to a temporary
 * file in its own directory, and only when all of them are safely on disk are they renamed.
 */
#ifndef FA_CLI_NPY_H
#define FA_CLI_NPY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum npy_type {
    NPY_FLOAT32 = 0,
    NPY_FLOAT16,
    NPY_BFLOAT16, /* of ml_dtypes; NumPy itself treats it as 2 bytes without a type ('<V2') */
    NPY_FLOAT64,  /* the last type of floats */
    NPY_BOOL,
    NPY_UINT8,
    NPY_INT32,
    NPY_INT64,
    NPY_NUM_TYPES
} npy_type;

enum {
    NPY_MAX_AXES = 8,
    NPY_ERROR_SIZE = 1024, /* fits a message with a long path */
    NPY_MAX_HEADER = 65536 /* bytes; real headers take some 100 */
};

typedef struct npy_array {
    npy_type type;
    int axes;
    int64_t shape[NPY_MAX_AXES];
    int64_t count; /* elements: the product of the extents, 1 if there is no axis */
    void *data;    /* count elements, malloc'd; never NULL after a successful read */
} npy_array;

/* The name, for example "float32", and the bytes per element. */
const char *npy_type_name(npy_type type);
size_t npy_type_size(npy_type type);

/* Reads a file, or standard input if path is "-". On failure returns false, with a sentence that
 * names the file in error (size NPY_ERROR_SIZE). The caller frees array->data. */
bool npy_read(const char *path, npy_array *array, char *error);

/* The same for a file's bytes in memory; messages have name in place of the path. */
bool npy_parse(const char *name, const void *bytes, size_t size, npy_array *array, char *error);

/* One file to be written. */
typedef struct npy_output {
    const char *path;
    npy_array array;
} npy_output;

/* Writes all of them, or none: after a failure no path has changed and no temporary file is left.
 * (A path of a device or a pipe is written to directly, when all others are safely on disk; so is
 * "-", standard output.) */
bool npy_write(const npy_output *outputs, int count, char *error);

#endif
