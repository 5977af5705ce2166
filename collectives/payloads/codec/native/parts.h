/* Elements in several pieces of memory, laid end to end and read as one, from the first to the last. */
#ifndef PARTS_H
#define PARTS_H

#include <stdint.h>

struct parts {
    const float *const *starts;
    const int64_t *borders; /* counted over all elements, one more of them than parts */
    int64_t part;           /* that was read last */
};

/* Where element i is, none before those asked for until now, and how many of its part begin there. */
static inline const float *element_at(struct parts *from, int64_t i, int64_t *length) {
    while (from->borders[from->part + 1] <= i)
        from->part++;
    *length = from->borders[from->part + 1] - i;
    return from->starts[from->part] + (i - from->borders[from->part]);
}

/* Elements start..start+width-1: where they are, if that is one part; else in `room`. */
static inline const float *elements_at(struct parts *from, int64_t start, int64_t width, float *room) {
    int64_t length = width;
    const float *here = width ? element_at(from, start, &length) : room;
    if (length >= width)
        return here;
    for (int64_t done = 0; done < width; done += length) {
        here = element_at(from, start + done, &length);
        length = length < width - done ? length : width - done;
        __builtin_memcpy(room + done, here, (uint64_t)length * sizeof *room);
    }
    return room;
}

#endif
