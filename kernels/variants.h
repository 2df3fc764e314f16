/*
 * The library's compiled kernels, one line each: the one source of truth for the build, which reads
 * these lines, and for the planner, which includes them.
 *
 *     KERNEL(name, file, architecture, definition)
 *
 *   name          of the image, and what plans call it
 *   file          kernels/<file>.cu; the kernel in it is called <file>
 *   architecture  the oldest one that it runs on. 75: any; its PTX is that of compute_75.
 *                 80: the same from compute_80. 90: sm_90a alone, which has no PTX
 *   definition    what the file is compiled with
 */
KERNEL(forward_simt_d64, forward_simt, 75, HEAD_DIM=64)
KERNEL(forward_simt_d128, forward_simt, 75, HEAD_DIM=128)
KERNEL(forward_simt_d256, forward_simt, 75, HEAD_DIM=256)
KERNEL(forward_simt_d512, forward_simt, 75, HEAD_DIM=512)
