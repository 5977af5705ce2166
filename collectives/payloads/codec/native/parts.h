/* A sequence of arrays that stand for their concatenation, which is read from front to back. */
#ifndef PARTS_H
#define PARTS_H

#include <stdint.h>

struct parts {
    const float *const *starts;
    const int64_t *borders; /* [num_parts + 1], index of each part's first element in the concatenation, then numel */
    int64_t part;           /* part that was read last */
};

/* Returns the address of element i, which must not precede the part read last; length: elements left in its part. */
static inline const float *element_at(struct parts *parts, int64_t i, int64_t *length) {
    while (parts->borders[parts->part + 1] <= i)
        parts->part++;
    *length = parts->borders[parts->part + 1] - i;
    return parts->starts[parts->part] + (i - parts->borders[parts->part]);
}

/* Returns the address of elements start..start+width-1; copies them to `buffer` if they lie in several parts. */
static inline const float *elements_at(struct parts *parts, int64_t start, int64_t width, float *buffer) {
    int64_t length = width;
    const float *here = width ? element_at(parts, start, &length) : buffer;
    if (length >= width)
        return here;
    for (int64_t done = 0; done < width; done += length) {
        here = element_at(parts, start + done, &length);
        length = length < width - done ? length : width - done;
        __builtin_memcpy(buffer + done, here, (uint64_t)length * sizeof *buffer);
    }
    return buffer;
}

#endif
