/* Sums in fp64 in an order that vectors of any width, and other devices, can follow.

   Stretches of 1024 terms, the last one filled up with zeros, are folded in half until one is left; then the sums of
   the stretches likewise. Zeros at the end change nothing, so less than a stretch may be folded as any power of two. */
#ifndef SUMS_H
#define SUMS_H

#include "magnitude.h"

#define SUM_STRETCH 1024
#define EIGHTH (SUM_STRETCH / 8)
#define LEVELS 4 /* 1024^4 terms */

/* What an element adds to a sum; each takes its parameter from it what it will. */
typedef double (*sum_term)(float x, float parameter);

static inline int32_t magnitude_bits(float x) {
    int32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits & 0x7fffffff;
}

/* The largest magnitude's bits, or `largest`. */
static inline int32_t larger(const float *x, int64_t numel, int32_t largest) {
    for (int64_t i = 0; i < numel; i++) {
        int32_t other = magnitude_bits(x[i]);
        largest = other > largest ? other : largest;
    }
    return largest;
}

/* |x| up to a limit. */
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
static inline double folded(double *terms, int64_t width) {
    for (int64_t half = width / 2; half > 0; half /= 2)
        for (int64_t i = 0; i < half; i++)
            terms[i] += terms[half + i];
    return terms[0];
}

/* The terms of 0 <= count <= SUM_STRETCH elements; the first three folds happen in registers. */
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
    return folded(terms, eighth);
}

/* Sums that wait to be folded: of stretches, of 1024 of these, and so on. */
struct folding {
    int64_t counts[LEVELS];
    double sums[LEVELS][SUM_STRETCH];
};

static inline void add_sum(struct folding *waiting, double sum) {
    for (int level = 0; level < LEVELS; level++) {
        double *sums = waiting->sums[level];
        sums[waiting->counts[level]++] = sum;
        if (waiting->counts[level] < SUM_STRETCH)
            return;
        sum = folded(sums, SUM_STRETCH);
        waiting->counts[level] = 0;
    }
}

/* The sum of all; 0 of none. */
static inline double finished(struct folding *waiting) {
    double sum = 0;
    for (int level = 0; level < LEVELS; level++) {
        double *sums = waiting->sums[level];
        int64_t count = waiting->counts[level];
        if (level)
            sums[count++] = sum;
        int64_t width = 1;
        while (width < count)
            width *= 2;
        __builtin_memset(sums + count, 0, (uint64_t)(width - count) * sizeof *sums);
        sum = folded(sums, width);
    }
    return sum;
}

/* The sum of the terms of any number of elements. */
static inline __attribute__((always_inline)) double sum_of(
    const float *x, int64_t numel, sum_term term, float parameter) {
    struct folding waiting;
    if (numel <= SUM_STRETCH)
        return stretch_sum(x, numel, term, parameter);
    __builtin_memset(waiting.counts, 0, sizeof waiting.counts);
    for (int64_t start = 0; start < numel; start += SUM_STRETCH) {
        int64_t width = numel - start < SUM_STRETCH ? numel - start : SUM_STRETCH;
        add_sum(&waiting, stretch_sum(x + start, width, term, parameter));
    }
    return finished(&waiting);
}

#endif
