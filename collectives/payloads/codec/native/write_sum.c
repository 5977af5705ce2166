/* A sum of sparse terms written once: all terms add to a block of it in the cache, which then goes where it belongs. */
#include "floats.h"
#include "past_cache.h"

enum { BLOCK = 4096 }; /* elements: half of a first cache at most, and dozens of entries of a term */

/* Entries from `next` on, of `count`, as long as they lie in the block. */
static void add_term(
    const void *values, int64_t kind, const int64_t *positions, int64_t count, int64_t *next, int64_t start,
    int64_t length, float factor, float *block) {
    float wide[AT_ONCE];
    int64_t i = *next, stop = i;
    while (i == stop && i < count) {
        int64_t first = i;
        stop = count - i < AT_ONCE ? count : i + AT_ONCE;
        widen(values, kind, first, stop - first, wide);
        for (int64_t j = 0; j < stop - first; j++)
            wide[j] *= factor;
        for (; i < stop && (uint64_t)positions[i] - (uint64_t)start < (uint64_t)length; i++)
            block[positions[i] - start] += wide[i - first];
    }
    *next = i;
}

/* The block moves to `out` and leaves zeros behind. */
static inline void move_block(float *block, int64_t length, int past_cache, float *out) {
    int64_t i = 0;
    if (past_cache && is_aligned(out))
        for (; i + VECTOR <= length; i += VECTOR) {
            store_past_cache(*(vector *)(block + i), out + i);
            *(vector *)(block + i) = (vector){0};
        }
    for (; i < length; i++) {
        out[i] = block[i];
        block[i] = 0;
    }
}

/* out = elements start..start+numel-1 of (term 0 + term 1 + ...) / divisor, from each term's entry `next`, which moves.
   block: zeros, before and after. */
static void write_part(
    const int64_t *values, const int64_t *kinds, const int64_t *positions, const int64_t *counts, int64_t *next,
    int64_t num_terms, float divisor, int64_t divide_first, int past_cache, float *block, int64_t start, float *out,
    int64_t numel) {
    float factor = divide_first ? 1.0f / divisor : 1.0f; /* by a power of two it is exact both ways */
    float sign_of_zero = num_terms == 1 ? 0.0f : -0.0f; /* one term is divided before it is added to zeros */
    int64_t length = before_aligned(out); /* all others start aligned */
    for (int64_t from = 0; from < numel; from += length, length = BLOCK) {
        length = numel - from < length ? numel - from : length;
        for (int64_t t = 0; t < num_terms; t++)
            add_term(
                (const void *)values[t], kinds[t], (const int64_t *)positions[t], counts[t], next + t, start + from,
                length, factor, block);
        if (!divide_first)
            for (int64_t i = 0; i < length; i++)
                block[i] = block[i] / divisor + sign_of_zero;
        move_block(block, length, past_cache, out + from);
    }
}

/* The parts, laid end to end, become the sum of the terms divided. Addresses: values and positions of every term, and
 * the parts. kinds: 0 fp32, 1 fp16, 2 bf16. divide_first: every value before it is added; else the sum. next: zeros; a
 * position that does not ascend, or lies outside, stops its term there. */
void write_sum(
    const int64_t *values, const int64_t *kinds, const int64_t *positions, const int64_t *counts, int64_t *next,
    int64_t num_terms, float divisor, int64_t divide_first, const int64_t *parts, const int64_t *numels,
    int64_t num_parts) {
    float block[BLOCK] __attribute__((aligned(sizeof(vector)))) = {0};
    int64_t start = 0, total = 0;
    for (int64_t p = 0; p < num_parts; p++)
        total += numels[p];
    for (int64_t p = 0; p < num_parts; p++) {
        write_part(
            values, kinds, positions, counts, next, num_terms, divisor, divide_first, total >= LONG, block, start,
            (float *)parts[p], numels[p]);
        start += numels[p];
    }
    finish_past_cache();
}
