/* Sums of sparse terms: all terms are added to a block that stays in the cache, and the block is stored once. */
#include "floats.h"
#include "nontemporal.h"

enum { BLOCK = 4096 }; /* elements: at most half of an L1 cache, but dozens of entries of each term */

/* Adds factor * the values of a term from entry *next on, as far as they lie in the block; advances *next. */
static void add_term(
    const void *values, int64_t dtype, const int64_t *positions, int64_t count, int64_t *next, int64_t start,
    int64_t length, float factor, float *block) {
    float wide[VALUE_CHUNK];
    int64_t i = *next, stop = i;
    while (i == stop && i < count) {
        int64_t first = i;
        stop = count - i < VALUE_CHUNK ? count : i + VALUE_CHUNK;
        widen(values, dtype, first, stop - first, wide);
        for (int64_t j = 0; j < stop - first; j++)
            wide[j] *= factor;
        for (; i < stop && (uint64_t)positions[i] - (uint64_t)start < (uint64_t)length; i++)
            block[positions[i] - start] += wide[i - first];
    }
    *next = i;
}

/* Stores the block to `out` and resets it to zeros. */
static inline void flush_block(float *block, int64_t length, int nontemporal, float *out) {
    int64_t i = 0;
    if (nontemporal && is_aligned(out))
        for (; i + VECTOR_NUMEL <= length; i += VECTOR_NUMEL) {
            store_nontemporal(*(vector *)(block + i), out + i);
            *(vector *)(block + i) = (vector){0};
        }
    for (; i < length; i++) {
        out[i] = block[i];
        block[i] = 0;
    }
}

/* out = elements start..start+numel-1 of the sum / divisor. The next entry of each term t is next[t], which is
   advanced. block: scratch memory, zeros before and after. */
static void write_part(
    const int64_t *values, const int64_t *dtypes, const int64_t *positions, const int64_t *counts, int64_t *next,
    int64_t num_terms, float divisor, int64_t divide_first, int nontemporal, float *block, int64_t start, float *out,
    int64_t numel) {
    float factor = divide_first ? 1.0f / divisor : 1.0f; /* exact: divisor is a power of two */
    float signed_zero = num_terms == 1 ? 0.0f : -0.0f; /* a single term is divided before it is added to +0.0 */
    int64_t length = numel_before_aligned(out); /* aligns all later blocks */
    for (int64_t offset = 0; offset < numel; offset += length, length = BLOCK) {
        length = numel - offset < length ? numel - offset : length;
        for (int64_t t = 0; t < num_terms; t++)
            add_term(
                (const void *)values[t], dtypes[t], (const int64_t *)positions[t], counts[t], next + t, start + offset,
                length, factor, block);
        if (!divide_first)
            for (int64_t i = 0; i < length; i++)
                block[i] = block[i] / divisor + signed_zero;
        flush_block(block, length, nontemporal, out + offset);
    }
}

/* Writes (term 0 + term 1 + ...) / divisor to `parts`, addresses of fp32 arrays with numels[p] elements that lie end to
   end. values, positions: addresses of each term's counts[t] values and ascending positions, int64; dtypes: 0 fp32, 1
   fp16, 2 bf16. divide_first: divides each value, not the sum. next: int64 [num_terms], zeros; next[t] < counts[t]
   afterwards if a position of the term does not ascend or is out of range. */
void write_sum(
    const int64_t *values, const int64_t *dtypes, const int64_t *positions, const int64_t *counts, int64_t *next,
    int64_t num_terms, float divisor, int64_t divide_first, const int64_t *parts, const int64_t *numels,
    int64_t num_parts) {
    float block[BLOCK] __attribute__((aligned(sizeof(vector)))) = {0};
    int64_t start = 0, total = 0;
    for (int64_t p = 0; p < num_parts; p++)
        total += numels[p];
    for (int64_t p = 0; p < num_parts; p++) {
        write_part(
            values, dtypes, positions, counts, next, num_terms, divisor, divide_first, total >= NONTEMPORAL_MIN_NUMEL,
            block, start, (float *)parts[p], numels[p]);
        start += numels[p];
    }
    fence_nontemporal_stores();
}
