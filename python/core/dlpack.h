/*
 * The part of DLPack's binary interface that a reader of arrays needs, written from its
 * specification: https://dmlc.github.io/dlpack/latest/c_api.html (versions 0.x and 1.x, and the
 * exchange table of 1.3). It is another project's interface, so its names are unchanged.
 */
#ifndef FLASHATTN_PYTHON_DLPACK_H
#define FLASHATTN_PYTHON_DLPACK_H

#include <stdint.h>

enum { kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3, kDLCUDAManaged = 13 };
enum { kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4, kDLBool = 6, kDLFloat8_e4m3fn = 10 };

typedef struct DLDevice {
    int32_t device_type;
    int32_t device_id;
} DLDevice;

typedef struct DLDataType {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
} DLDataType;

typedef struct DLTensor {
    void *data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape;
    int64_t *strides;     /* in elements; NULL: contiguous, the last axis fastest */
    uint64_t byte_offset; /* from data to the first element */
} DLTensor;

/* In a capsule named "dltensor". */
typedef struct DLManagedTensor {
    DLTensor dl_tensor;
    void *manager_ctx;
    void (*deleter)(struct DLManagedTensor *self);
} DLManagedTensor;

typedef struct DLPackVersion {
    uint32_t major;
    uint32_t minor;
} DLPackVersion;

#define DLPACK_FLAG_BITMASK_READ_ONLY 1u

/* In a capsule named "dltensor_versioned". */
typedef struct DLManagedTensorVersioned {
    DLPackVersion version;
    void *manager_ctx;
    void (*deleter)(struct DLManagedTensorVersioned *self);
    uint64_t flags;
    DLTensor dl_tensor;
} DLManagedTensorVersioned;

typedef struct DLPackExchangeAPIHeader {
    DLPackVersion version;
    struct DLPackExchangeAPIHeader *prev_api;
} DLPackExchangeAPIHeader;

/* In a capsule named "dlpack_exchange_api", the attribute __dlpack_c_exchange_api__ of a type. */
typedef struct DLPackExchangeAPI {
    DLPackExchangeAPIHeader header;
    void (*managed_tensor_allocator)(void);
    void (*managed_tensor_from_py_object_no_sync)(void);
    void (*managed_tensor_to_py_object_no_sync)(void);
    /* Fills a view that lives as long as the object; may be NULL. -1: a Python error is set. */
    int (*dltensor_from_py_object_no_sync)(void *object, DLTensor *view);
    int (*current_work_stream)(int32_t device_type, int32_t device_id, void **stream);
} DLPackExchangeAPI;

#endif
