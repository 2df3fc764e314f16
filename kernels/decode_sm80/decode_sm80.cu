/*
 * Attention of few queries over many keys, from Ampere on. Reading keys and values takes nearly all
 * the time, so each is read only once. Float16 or bfloat16 with float32 sums; every option of the
 * API except dropout.
 *
 *   config.cuh  the numbers of the variant, parts of threads  load.cuh    copies to shared memory
 *   work.cuh    the block's queries, heads and keys           attend.cuh  a warp's loop over keys
 *   merge.cuh   sums of warps and of parts, results
 *
 * The query heads that share a key/value head, and some queries of a sequence, are the rows of one
 * work tile. Its keys are divided into parts, one for each block, and the block's warps take a
 * part's key tiles in turn. Each warp has its own pipeline, bases and sums, so no warp waits for
 * another before the end. Then the block merges its warps' sums, and the last block of a work tile
 * merges its parts (Flash-Decoding: Dao, Haziza, Massa, Sizov 2023).
 */
#include "decode_sm80/attend.cuh"
#include "decode_sm80/config.cuh"
#include "decode_sm80/last_part.cuh"
#include "decode_sm80/merge.cuh"
#include "decode_sm80/work.cuh"

/* Computes the block's part of the keys. Returns whether this block must merge all parts. */
FA_DEVICE bool run_part(const fa_decode_params *d, const fa_work *w, float *memory)
{
    float *stages = memory + QUERY_BYTES / 4;
    const fa_merged merged = {memory, memory + ROWS * WARPS};
    const fa_memory at = find_memory(memory);
#if LATENT
    const fa_sources warps = {stages, 0, w->parts > 0 ? 1 : 0};
#else
    const fa_sources warps = {stages, WARP_BYTES / 4, w->parts > 0 ? WARPS : 0};
#endif
    if (w->parts > 0) {
        fa_output o;
        attend(d, w, &at, &o);
#if LATENT
        store_block(&o, &at, stages);
#else
        __syncwarp();
        store_warp(&o, stages + warp_id() * (WARP_BYTES / 4));
#endif
        __syncthreads(); /* also: all warps have used the queries */
    }
    merge(d, w, &warps, &merged, w->parts > 1 ? find_part(d, w, w->part) : NULL);
    return w->parts > 1 && d->step == FA_DECODE_LAST && is_last_part(d, w);
}

FA_KERNEL __launch_bounds__(THREADS, BLOCKS) decode_sm80(const __grid_constant__ fa_decode_params d)
{
    FA_DYNAMIC_SHARED(memory);
    __shared__ fa_work w;
    find_work(&d, NULL, &w);
    bool merges = d.step == FA_DECODE_MERGE && w.parts > 1;
    if (w.rows == 0) return;
    if (d.step != FA_DECODE_MERGE && w.part < max(w.parts, 1)) merges = run_part(&d, &w, memory);
    if (!merges) return;
    const fa_sources parts = {find_part(&d, &w, 0), part_floats(&d), w.parts};
    const fa_merged merged = {memory + QUERY_BYTES / 4, memory};
    merge(&d, &w, &parts, &merged, NULL);
}
