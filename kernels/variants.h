/*
 * The library's compiled kernels, one line each: the one source of truth for the build, which reads
 * these lines, and for the planner, which includes them.
 *
 *     KERNEL(name, file, architecture, definition...)
 *
 *   name          of the image, and what plans call it
 *   file          kernels/<file>.cu; the kernel in it is called <file>
 *   architecture  the oldest one that it runs on. 75: any; its PTX is that of compute_75.
 *                 80: the same from compute_80. 90: sm_90a alone, which has no PTX
 *   definition    what the file is compiled with, one or more. The file is read once, as of the
 *                 oldest architecture, and with EACH_ARCHITECTURE=1 anew for each: only then
 *                 __CUDA_ARCH__ tells them apart
 */
KERNEL(forward_simt_d64, forward_simt, 75, HEAD_DIM=64)
KERNEL(forward_simt_d128, forward_simt, 75, HEAD_DIM=128, EACH_ARCHITECTURE=1)
KERNEL(forward_simt_d256, forward_simt, 75, HEAD_DIM=256)
KERNEL(forward_simt_d512, forward_simt, 75, HEAD_DIM=512)

KERNEL(forward_sm90_d64_f16, forward_sm90, 90, SHAPE=d64, BFLOAT16=0, GENERAL=0)
KERNEL(forward_sm90_d64_bf16, forward_sm90, 90, SHAPE=d64, BFLOAT16=1, GENERAL=0)
KERNEL(forward_sm90_d64_two_f16, forward_sm90, 90, SHAPE=d64_two, BFLOAT16=0, GENERAL=0)
KERNEL(forward_sm90_d64_two_bf16, forward_sm90, 90, SHAPE=d64_two, BFLOAT16=1, GENERAL=0)
KERNEL(forward_sm90_d80_f16, forward_sm90, 90, SHAPE=d80, BFLOAT16=0, GENERAL=0)
KERNEL(forward_sm90_d80_bf16, forward_sm90, 90, SHAPE=d80, BFLOAT16=1, GENERAL=0)
KERNEL(forward_sm90_d96_f16, forward_sm90, 90, SHAPE=d96, BFLOAT16=0, GENERAL=0)
KERNEL(forward_sm90_d96_bf16, forward_sm90, 90, SHAPE=d96, BFLOAT16=1, GENERAL=0)
KERNEL(forward_sm90_d128_f16, forward_sm90, 90, SHAPE=d128, BFLOAT16=0, GENERAL=0)
KERNEL(forward_sm90_d128_bf16, forward_sm90, 90, SHAPE=d128, BFLOAT16=1, GENERAL=0)
KERNEL(forward_sm90_d192_128_f16, forward_sm90, 90, SHAPE=d192_128, BFLOAT16=0, GENERAL=0)
KERNEL(forward_sm90_d192_128_bf16, forward_sm90, 90, SHAPE=d192_128, BFLOAT16=1, GENERAL=0)
KERNEL(forward_sm90_d192_f16, forward_sm90, 90, SHAPE=d192, BFLOAT16=0, GENERAL=0)
KERNEL(forward_sm90_d192_bf16, forward_sm90, 90, SHAPE=d192, BFLOAT16=1, GENERAL=0)
KERNEL(forward_sm90_d256_f16, forward_sm90, 90, SHAPE=d256, BFLOAT16=0, GENERAL=0)
KERNEL(forward_sm90_d256_bf16, forward_sm90, 90, SHAPE=d256, BFLOAT16=1, GENERAL=0)
KERNEL(forward_sm90_general64_f16, forward_sm90, 90, SHAPE=general64, BFLOAT16=0, GENERAL=1)
KERNEL(forward_sm90_general64_bf16, forward_sm90, 90, SHAPE=general64, BFLOAT16=1, GENERAL=1)
KERNEL(forward_sm90_general128_f16, forward_sm90, 90, SHAPE=general128, BFLOAT16=0, GENERAL=1)
KERNEL(forward_sm90_general128_bf16, forward_sm90, 90, SHAPE=general128, BFLOAT16=1, GENERAL=1)
KERNEL(forward_sm90_general256_f16, forward_sm90, 90, SHAPE=general256, BFLOAT16=0, GENERAL=1)
KERNEL(forward_sm90_general256_bf16, forward_sm90, 90, SHAPE=general256, BFLOAT16=1, GENERAL=1)

KERNEL(forward_sm80_d64_f16, forward_sm80, 80, HEAD_DIM=64, BFLOAT16=0, GENERAL=0)
KERNEL(forward_sm80_d64_f16_general, forward_sm80, 80, HEAD_DIM=64, BFLOAT16=0, GENERAL=1)
KERNEL(forward_sm80_d64_bf16, forward_sm80, 80, HEAD_DIM=64, BFLOAT16=1, GENERAL=0)
KERNEL(forward_sm80_d64_bf16_general, forward_sm80, 80, HEAD_DIM=64, BFLOAT16=1, GENERAL=1)
KERNEL(forward_sm80_d96_f16, forward_sm80, 80, HEAD_DIM=96, BFLOAT16=0, GENERAL=0)
KERNEL(forward_sm80_d96_f16_general, forward_sm80, 80, HEAD_DIM=96, BFLOAT16=0, GENERAL=1)
KERNEL(forward_sm80_d96_bf16, forward_sm80, 80, HEAD_DIM=96, BFLOAT16=1, GENERAL=0)
KERNEL(forward_sm80_d96_bf16_general, forward_sm80, 80, HEAD_DIM=96, BFLOAT16=1, GENERAL=1)
KERNEL(forward_sm80_d128_f16, forward_sm80, 80, HEAD_DIM=128, BFLOAT16=0, GENERAL=0)
KERNEL(forward_sm80_d128_f16_general, forward_sm80, 80, HEAD_DIM=128, BFLOAT16=0, GENERAL=1)
KERNEL(forward_sm80_d128_bf16, forward_sm80, 80, HEAD_DIM=128, BFLOAT16=1, GENERAL=0)
KERNEL(forward_sm80_d128_bf16_general, forward_sm80, 80, HEAD_DIM=128, BFLOAT16=1, GENERAL=1)
KERNEL(forward_sm80_d192_f16, forward_sm80, 80, HEAD_DIM=192, BFLOAT16=0, GENERAL=0)
KERNEL(forward_sm80_d192_f16_general, forward_sm80, 80, HEAD_DIM=192, BFLOAT16=0, GENERAL=1)
KERNEL(forward_sm80_d192_bf16, forward_sm80, 80, HEAD_DIM=192, BFLOAT16=1, GENERAL=0)
KERNEL(forward_sm80_d192_bf16_general, forward_sm80, 80, HEAD_DIM=192, BFLOAT16=1, GENERAL=1)
KERNEL(forward_sm80_d256_f16, forward_sm80, 80, HEAD_DIM=256, BFLOAT16=0, GENERAL=0)
KERNEL(forward_sm80_d256_f16_general, forward_sm80, 80, HEAD_DIM=256, BFLOAT16=0, GENERAL=1)
KERNEL(forward_sm80_d256_bf16, forward_sm80, 80, HEAD_DIM=256, BFLOAT16=1, GENERAL=0)
KERNEL(forward_sm80_d256_bf16_general, forward_sm80, 80, HEAD_DIM=256, BFLOAT16=1, GENERAL=1)
KERNEL(forward_sm80_d512_f16, forward_sm80, 80, HEAD_DIM=512, BFLOAT16=0, GENERAL=1)
KERNEL(forward_sm80_d512_bf16, forward_sm80, 80, HEAD_DIM=512, BFLOAT16=1, GENERAL=1)
KERNEL(forward_sm80_d256_f16_small, forward_sm80, 80, HEAD_DIM=256, BFLOAT16=0, GENERAL=1, SMALL=1)
KERNEL(forward_sm80_d256_bf16_small, forward_sm80, 80, HEAD_DIM=256, BFLOAT16=1, GENERAL=1, SMALL=1)
KERNEL(forward_sm75_d64_f16, forward_sm80, 75, HEAD_DIM=64, BFLOAT16=0, GENERAL=1, SMALL=2, ARCH=75)
KERNEL(forward_sm75_d128_f16, forward_sm80, 75, HEAD_DIM=128, BFLOAT16=0, GENERAL=1, SMALL=2, ARCH=75)
KERNEL(forward_sm75_d256_f16, forward_sm80, 75, HEAD_DIM=256, BFLOAT16=0, GENERAL=1, SMALL=2, ARCH=75)

KERNEL(backward_dq_simt_d64, backward_dq_simt, 75, HEAD_DIM=64)
KERNEL(backward_dq_simt_d128, backward_dq_simt, 75, HEAD_DIM=128)
KERNEL(backward_dq_simt_d256, backward_dq_simt, 75, HEAD_DIM=256)
KERNEL(backward_dq_simt_d512, backward_dq_simt, 75, HEAD_DIM=512)
KERNEL(backward_dkv_simt_d64, backward_dkv_simt, 75, HEAD_DIM=64)
KERNEL(backward_dkv_simt_d128, backward_dkv_simt, 75, HEAD_DIM=128)
KERNEL(backward_dkv_simt_d256, backward_dkv_simt, 75, HEAD_DIM=256)
KERNEL(backward_dkv_simt_d512, backward_dkv_simt, 75, HEAD_DIM=512)
KERNEL(backward_delta, backward_delta, 75, ANY_HEAD_DIM=1)
KERNEL(backward_dbias_simt, backward_dbias_simt, 75, ANY_HEAD_DIM=1)
KERNEL(backward_dsinks, backward_dsinks, 75, ANY_HEAD_DIM=1)
KERNEL(weights_simt, weights_simt, 75, ANY_HEAD_DIM=1)
KERNEL(combine_few, combine, 75, MOST_PARTS=64)
KERNEL(combine_many, combine, 75, MOST_PARTS=640)
