/* A sum of sparse terms written once: a block of the result stays in the cache while all terms add to it. */
#include "floats.h"

enum { BLOCK = 8192 };

static inline __attribute__((always_inline)) float wide(const void *values, int64_t i, int64_t kind) {
    if (kind == 0)
        return ((const float *)values)[i];
    uint16_t half = ((const uint16_t *)values)[i];
    return kind == 1 ? from_fp16(half) : from_bf16(half);
}

static inline __attribute__((always_inline)) void add_term(
    const void *values, int64_t kind, const int64_t *positions, int64_t count, int64_t *next, int64_t start,
    int64_t stop, float divisor, float *block) {
    int64_t i = *next;
    for (; i < count && positions[i] >= start && positions[i] < stop; i++)
        block[positions[i] - start] += wide(values, i, kind) / divisor;
    *next = i;
}

/* out = elements start..start+numel-1 of (term 0 + term 1 + ...) / divisor, from each term's entry `next`, which moves. */
static void write_part(
    const int64_t *values, const int64_t *kinds, const int64_t *positions, const int64_t *counts, int64_t *next,
    int64_t num_terms, float divisor, int64_t divide_first, int64_t start, float *out, int64_t numel) {
    float each = divide_first ? divisor : 1.0f;
    for (int64_t from = 0; from < numel; from += BLOCK) {
        int64_t length = numel - from < BLOCK ? numel - from : BLOCK;
        int64_t first = start + from, end = first + length;
        float *block = out + from;
        for (int64_t i = 0; i < length; i++)
            block[i] = 0.0f;
        for (int64_t t = 0; t < num_terms; t++) {
            const void *held = (const void *)values[t];
            const int64_t *places = (const int64_t *)positions[t];
            if (kinds[t] == 0)
                add_term(held, 0, places, counts[t], next + t, first, end, each, block);
            else if (kinds[t] == 1)
                add_term(held, 1, places, counts[t], next + t, first, end, each, block);
            else
                add_term(held, 2, places, counts[t], next + t, first, end, each, block);
        }
        if (!divide_first)
            for (int64_t i = 0; i < length; i++)
                block[i] /= divisor;
    }
}

/* The parts, laid end to end, become the sum of the terms divided. Addresses: values and positions of every term, and
 * the parts. kinds: 0 fp32, 1 fp16, 2 bf16. divide_first: every value before it is added; else the sum. next: zeros; a
 * position that does not ascend, or lies outside, stops its term there. */
void write_sum(
    const int64_t *values, const int64_t *kinds, const int64_t *positions, const int64_t *counts, int64_t *next,
    int64_t num_terms, float divisor, int64_t divide_first, const int64_t *parts, const int64_t *numels,
    int64_t num_parts) {
    int64_t start = 0;
    for (int64_t p = 0; p < num_parts; p++) {
        write_part(
            values, kinds, positions, counts, next, num_terms, divisor, divide_first, start, (float *)parts[p],
            numels[p]);
        start += numels[p];
    }
}
