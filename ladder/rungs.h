/*
 * The ladder: its rungs from the bottom up. The one list of them: CMake reads it to compile the files
 * NN_name.cu, ladder.c to run them.
 *
 * RUNG(number, name, architecture, types, largest head dim, idea)
 *   architecture   80: from Ampere on (sm_80 code, PTX for what follows); 90: Hopper only (sm_90a)
 *   types          FLOAT32: float32 in and out, float32 arithmetic; TF32: float32 in and out, products
 *                  rounded to tf32; HALVES: bfloat16 and float16
 * A file is compiled once for each head dim of 64, 128 and 256 up to its largest, as -DHEAD_DIM=..., and
 * for HALVES once with -DELEMENT=FA_ELEMENT_BFLOAT16 and once with -DELEMENT=FA_ELEMENT_FLOAT16.
 */
RUNG(00, reference, 80, FLOAT32, 256, "unfused: scores, softmax, values as three kernels")
RUNG(01, flash_naive, 80, FLOAT32, 256, "one block a head, one thread a row, online softmax")
RUNG(02, flash_2d, 80, FLOAT32, 256, "two-dimensional blocks, coalesced loads")
RUNG(03, warp_wmma, 80, TF32, 256, "tensor cores by wmma (tf32), one warp a block")
RUNG(04, block_wmma, 80, TF32, 256, "several warps a block share K and V tiles")
RUNG(05, block_wmma_async, 80, TF32, 256, "cp.async loads the next tile under the products")
RUNG(06, scalar2d_row_tile, 80, FLOAT32, 256, "a block a row tile: the grid fills the card")
RUNG(07, wmma_row_block, 80, TF32, 256, "row tiles with wmma")
RUNG(08, kernel_mma, 80, TF32, 256, "mma.sync m16n8k8 by inline PTX, scores stay in registers")
RUNG(09, kernel_mma_swizzle, 80, TF32, 256, "swizzled shared memory: no bank conflicts")
RUNG(10, kernel_mma_qreg, 80, TF32, 256, "FlashAttention-2: Q in registers, few barriers")
RUNG(11, kernel_mma_qreg_f32x4load, 80, TF32, 256, "128-bit loads")
RUNG(12, kernel_mma_qreg_async, 80, TF32, 256, "cp.async pipeline")
RUNG(13, mma_fp16, 80, HALVES, 256, "16-bit operands, ldmatrix, m16n8k16: FlashAttention-2 on Ampere")
RUNG(14, wgmma_tma, 90, HALVES, 256, "Hopper: TMA loads, wgmma, one consumer warpgroup")
RUNG(15, warp_specialized, 90, HALVES, 256, "a producer warp, two consumer warpgroups, mbarriers")
RUNG(16, pingpong, 90, HALVES, 256, "softmax of one warpgroup under the products of the other")
RUNG(17, persistent, 90, HALVES, 256, "persistent blocks, longest tiles first under causal")
