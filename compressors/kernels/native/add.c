/* Updates of residuals and momentum buffers in one pass. Products are rounded before they are added. */
#include "../../../collectives/payloads/codec/native/nontemporal.h"

/* out = a + factor * b, all fp32 [numel]; out may be b. */
void add_scaled(const float *a, float factor, const float *b, int64_t numel, float *out) {
    int64_t i = 0;
    if (numel >= NONTEMPORAL_MIN_NUMEL) {
        for (; !is_aligned(out + i); i++)
            out[i] = a[i] + factor * b[i];
        for (; i + VECTOR_NUMEL <= numel; i += VECTOR_NUMEL) {
            vector left, right;
            __builtin_memcpy(&left, a + i, sizeof left);
            __builtin_memcpy(&right, b + i, sizeof right);
            store_nontemporal(left + factor * right, out + i);
        }
        fence_nontemporal_stores();
    }
    for (; i < numel; i++)
        out[i] = a[i] + factor * b[i];
}

struct accelerated {
    vector velocity, sum;
};

/* Rounds after each operation, like separate tensor operations would. */
static inline struct accelerated accelerated(
    vector g, vector velocity, vector residual, float momentum, int64_t nesterov) {
    vector now = nesterov ? momentum * (g + velocity) : g + momentum * velocity;
    vector sum = now + residual;
    return (struct accelerated){now, nesterov ? g + sum : sum};
}

static inline void accelerate_one(
    const float *g, const float *velocity, const float *residual, float momentum, int64_t nesterov, float *now,
    float *sum) {
    struct accelerated next = accelerated((vector){*g}, (vector){*velocity}, (vector){*residual}, momentum, nesterov);
    *now = next.velocity[0];
    *sum = next.sum[0];
}

/* now = gradient + momentum * velocity, and sum = now + residual; with nesterov, now = momentum * (gradient +
   velocity), and sum = gradient + (now + residual). All are fp32 [numel]. */
void accelerate(
    const float *gradient, const float *velocity, const float *residual, float momentum, int64_t nesterov,
    int64_t numel, float *now, float *sum) {
    int64_t i = 0;
    if (numel >= NONTEMPORAL_MIN_NUMEL && (uintptr_t)now % sizeof(vector) == (uintptr_t)sum % sizeof(vector)) {
        for (; !is_aligned(now + i); i++)
            accelerate_one(gradient + i, velocity + i, residual + i, momentum, nesterov, now + i, sum + i);
        for (; i + VECTOR_NUMEL <= numel; i += VECTOR_NUMEL) {
            struct accelerated next = accelerated(
                load_vector(gradient + i), load_vector(velocity + i), load_vector(residual + i), momentum, nesterov);
            store_nontemporal(next.velocity, now + i);
            store_nontemporal(next.sum, sum + i);
        }
        fence_nontemporal_stores();
    }
    for (; i < numel; i++)
        accelerate_one(gradient + i, velocity + i, residual + i, momentum, nesterov, now + i, sum + i);
}

/* Runs `accelerate` for several gradients; gradient p has elements borders[p]..borders[p+1]-1 of the other arrays. */
void accelerate_parts(
    const float *const *gradients, const int64_t *borders, int64_t num_parts, const float *velocity,
    const float *residual, float momentum, int64_t nesterov, float *now, float *sum) {
    for (int64_t part = 0; part < num_parts; part++) {
        int64_t start = borders[part], numel = borders[part + 1] - start;
        accelerate(gradients[part], velocity + start, residual + start, momentum, nesterov, numel, now + start,
                   sum + start);
    }
}
