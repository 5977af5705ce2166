/* Sums in fp64 in a fixed order, which vectors of any width and other devices can follow.

   Stretches of 1024 terms, the last one padded with zeros, are folded in half until one term is left; then the sums of
   the stretches likewise. Zeros at the end change nothing, so a shorter stretch is padded to a power of two only. */
#ifndef SUMS_H
#define SUMS_H

#include "magnitude.h"

#define SUM_STRETCH 1024
#define EIGHTH (SUM_STRETCH / 8)
#define FOLD_LEVELS 4 /* up to 1024^4 terms */

/* Returns the term of element x; each function uses the parameter in its own way. */
typedef double (*sum_term)(float x, float parameter);

static inline int32_t magnitude_bits(float x) {
    int32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits & 0x7fffffff;
}

/* Returns the bits of the largest magnitude in x, at least `largest`. */
static inline int32_t largest_bits(const float *x, int64_t numel, int32_t largest) {
    for (int64_t i = 0; i < numel; i++) {
        int32_t other = magnitude_bits(x[i]);
        largest = other > largest ? other : largest;
    }
    return largest;
}

/* min(|x|, limit). */
static inline double limited_term(float x, float limit) {
    float magnitude = __builtin_fabsf(x);
    return magnitude > limit ? limit : magnitude;
}

static inline double square_term(float x, float limit) {
    double magnitude = limited_term(x, limit);
    return magnitude * magnitude;
}

static inline double positive_term(float x, float unused) {
    (void)unused;
    return x >= 0 ? x : 0;
}

static inline double negative_term(float x, float unused) {
    (void)unused;
    return x >= 0 ? 0 : x;
}

/* Folds `width` terms, a power of two, in place. */
static inline double fold(double *terms, int64_t width) {
    for (int64_t half = width / 2; half > 0; half /= 2)
        for (int64_t i = 0; i < half; i++)
            terms[i] += terms[half + i];
    return terms[0];
}

/* Returns the sum of the terms of 0 <= count <= SUM_STRETCH elements. The first three folds are done in registers. */
static inline __attribute__((always_inline)) double stretch_sum(
    const float *x, int64_t count, sum_term term, float parameter) {
    float padded[SUM_STRETCH];
    double terms[EIGHTH];
    int64_t width = EIGHTH;
    if (!count)
        return 0;
    while (width < count)
        width *= 2;
    if (count < width) {
        __builtin_memcpy(padded, x, (uint64_t)count * sizeof *x);
        __builtin_memset(padded + count, 0, (uint64_t)(width - count) * sizeof *padded);
        x = padded;
    }
    int64_t eighth = width / 8;
    for (int64_t i = 0; i < eighth; i++) {
        double t[8];
        for (int64_t j = 0; j < 8; j++)
            t[j] = term(x[i + j * eighth], parameter);
        terms[i] = ((t[0] + t[4]) + (t[2] + t[6])) + ((t[1] + t[5]) + (t[3] + t[7]));
    }
    return fold(terms, eighth);
}

/* Sums to be folded: level 0 holds those of stretches, level 1 those of 1024 stretches, and so on. */
struct folded_sum {
    int64_t counts[FOLD_LEVELS];
    double sums[FOLD_LEVELS][SUM_STRETCH];
};

static inline void push_sum(struct folded_sum *pending, double sum) {
    for (int level = 0; level < FOLD_LEVELS; level++) {
        double *sums = pending->sums[level];
        sums[pending->counts[level]++] = sum;
        if (pending->counts[level] < SUM_STRETCH)
            return;
        sum = fold(sums, SUM_STRETCH);
        pending->counts[level] = 0;
    }
}

/* Returns the sum of all; 0 if there is none. */
static inline double finish_sum(struct folded_sum *pending) {
    double sum = 0;
    for (int level = 0; level < FOLD_LEVELS; level++) {
        double *sums = pending->sums[level];
        int64_t count = pending->counts[level];
        if (level)
            sums[count++] = sum;
        int64_t width = 1;
        while (width < count)
            width *= 2;
        __builtin_memset(sums + count, 0, (uint64_t)(width - count) * sizeof *sums);
        sum = fold(sums, width);
    }
    return sum;
}

/* Returns the sum of the terms of any number of elements. */
static inline __attribute__((always_inline)) double sum_of(
    const float *x, int64_t numel, sum_term term, float parameter) {
    struct folded_sum pending;
    if (numel <= SUM_STRETCH)
        return stretch_sum(x, numel, term, parameter);
    __builtin_memset(pending.counts, 0, sizeof pending.counts);
    for (int64_t start = 0; start < numel; start += SUM_STRETCH) {
        int64_t width = numel - start < SUM_STRETCH ? numel - start : SUM_STRETCH;
        push_sum(&pending, stretch_sum(x + start, width, term, parameter));
    }
    return finish_sum(&pending);
}

#endif
