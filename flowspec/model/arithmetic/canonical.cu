/* The canonical arithmetic on NVIDIA's GPUs. `plain.py` defines it, with one torch operation for each step:
 * on a GPU each has to be started, some hundreds for a layer. Here each operation is a kernel, or four. NVRTC
 * compiles this file where it runs (`model/gpu.py`), without fusing a multiplication with an addition.
 *
 * The file is C as well. Tests compile it with FLOWSPEC_HOST, where a block has one thread: then every loop
 * over threads runs through, and what a kernel computes can be held to the definitions without a GPU. What
 * several threads do wrong together, such as a missing SYNC, only the trial on a GPU finds.
 */
typedef long long int64;
typedef unsigned short uint16;

#ifdef FLOWSPEC_HOST
#include <math.h>
#include <stdint.h>
#include <string.h>
typedef struct {
    int x;
} Place;
static Place blockIdx, gridDim, blockDim = {1};
static const Place threadIdx = {0};
float flowspec_room[1 << 16]; /* tests look at what of it is used */
#define room flowspec_room
#define DEVICE static inline
#define SYNC
#define KERNEL(name, Given)                                                                                  \
    static void name##_block(const Given a);                                                                 \
    void name(const Given *a, int blocks) {                                                                  \
        gridDim.x = blocks;                                                                                  \
        for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)                                              \
            name##_block(*a);                                                                                \
    }                                                                                                        \
    static void name##_block(const Given a)
DEVICE int as_bits(float value) {
    int found;
    memcpy(&found, &value, 4);
    return found;
}
DEVICE float as_number(int bits) {
    float found;
    memcpy(&found, &bits, 4);
    return found;
}
DEVICE float of_half(uint16 bits) {
    const int exponent = bits >> 10 & 31, digits = bits & 1023;
    float size = ldexpf((float)(digits + (exponent ? 1024 : 0)), (exponent ? exponent : 1) - 25);
    if (exponent == 31)
        size = digits ? NAN : INFINITY;
    return bits >> 15 ? -size : size;
}
DEVICE uint16 to_half(float value) { /* to even */
    const unsigned bits = (unsigned)as_bits(value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (value != value)
        return (uint16)(sign | 0x7e00);
    if (size >= 0x477ff000) /* 65520 */
        return (uint16)(sign | 0x7c00);
    if (size < 0x38800000) /* 2^-14 */
        return (uint16)(sign | (unsigned)nearbyintf(ldexpf(as_number((int)size), 24)));
    return (uint16)(sign | (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
}
#else
#define DEVICE static __device__ __forceinline__
#define SYNC __syncthreads()
#define KERNEL(name, Given) extern "C" __global__ void name(const Given a)
extern __shared__ float room[];
DEVICE int as_bits(float value) { return __float_as_int(value); }
DEVICE float as_number(int bits) { return __int_as_float(bits); }
DEVICE float of_half(uint16 bits) {
    float found;
    asm("cvt.f32.f16 %0, %1;" : "=f"(found) : "h"(bits));
    return found;
}
DEVICE uint16 to_half(float value) {
    uint16 found;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(found) : "f"(value));
    return found;
}
#endif

/* All numbers from 0, divided among all threads; and among those of a block. */
#define FOR_ALL(i, count)                                                                                    \
    for (int64 i = (int64)blockIdx.x * blockDim.x + threadIdx.x; i < (count);                                \
         i += (int64)gridDim.x * blockDim.x)
#define IN_BLOCK(i, count) for (int64 i = threadIdx.x; i < (count); i += blockDim.x)
#define LANES 16
#define BLOCK 64 /* positions, as `plain.BLOCK` */
#define LEAST as_number((int)0xff800000)

enum { FLOAT32, BFLOAT16, FLOAT16 };

DEVICE float widened(const void *from, int64 i, int kind) {
    if (kind == FLOAT32)
        return ((const float *)from)[i];
    const uint16 bits = ((const uint16 *)from)[i];
    return kind == BFLOAT16 ? as_number((int)bits << 16) : of_half(bits);
}

DEVICE uint16 to_bfloat16(float value) {
    const unsigned bits = (unsigned)as_bits(value);
    if (value != value)
        return (uint16)(bits >> 16 & 0x8000) | 0x7fc0;
    return (uint16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

DEVICE void narrow(void *to, int64 i, int kind, float value) {
    if (kind == FLOAT32)
        ((float *)to)[i] = value;
    else
        ((uint16 *)to)[i] = kind == BFLOAT16 ? to_bfloat16(value) : to_half(value);
}

/* -------------------------------------------------------------------------------------------- functions */

DEVICE float exponential(float x) {
    if (x != x)
        return x;
    const float bounded = x > 88.0f ? 88.0f : x < -86.0f ? -86.0f : x;
    const float shifted = bounded * 1.44269504088896341f + 12582912.0f, whole = shifted - 12582912.0f;
    const float rest = (bounded - whole * 0.693359375f) - whole * -2.12194440e-4f;
    float found = 1.9875691500e-4f;
    found = found * rest + 1.3981999507e-3f;
    found = found * rest + 8.3334519073e-3f;
    found = found * rest + 4.1665795894e-2f;
    found = found * rest + 1.6666665459e-1f;
    found = found * rest + 5.0000001201e-1f;
    found = found * (rest * rest) + rest + 1.0f;
    if (x < -86.0f)
        return 0.0f;
    const unsigned power = ((unsigned)as_bits(shifted) - 0x4b400000u) << 23;
    return as_number((int)((unsigned)as_bits(found) + power));
}

DEVICE float logistic(float x) { return 1.0f / (1.0f + exponential(-x)); }

DEVICE float hyperbolic(float x) {
    const float size = as_number(as_bits(x) & 0x7fffffff);
    const float found = 1.0f - 2.0f * (1.0f / (1.0f + exponential(size + size)));
    return as_number((as_bits(found) & 0x7fffffff) | (as_bits(x) & (int)0x80000000));
}

enum { SILU, GELU_TANH, TANH, SIGMOID, RELU };

DEVICE float function_of(float x, int function) {
    if (function == SILU)
        return x * logistic(x);
    if (function == GELU_TANH)
        return 0.5f * x * (1.0f + hyperbolic((x + 0.044715f * (x * x * x)) * 0.79788456080286536f));
    if (function == RELU)
        return x < 0.0f ? 0.0f : x;
    return function == TANH ? hyperbolic(x) : logistic(x);
}

typedef struct {
    const float *x, *times; /* `times` may be NULL */
    float *y;
    int64 count;
    int function;
} Function;

KERNEL(flowspec_function, Function) {
    FOR_ALL(i, a.count) {
        const float found = function_of(a.x[i], a.function);
        a.y[i] = a.times ? found * a.times[i] : found;
    }
}

/* ----------------------------------------------------------------------- sums in halves, norms and shares */

/* Half of the power of two that numbers are filled up to; 0 for one alone. */
DEVICE int64 half_room(int64 count) {
    int64 half = 0;
    while (2 * half < count && count > 1)
        half = half ? 2 * half : 1;
    return half;
}

/* Of all threads of a block the sum of `half` terms in `room`; of one alone that is in its first place. */
DEVICE float folded(int64 half) {
    for (half /= 2; half; half /= 2) {
        SYNC;
        IN_BLOCK(i, half) room[i] += room[i + half];
    }
    SYNC;
    return room[0];
}

enum { BY_WEIGHTS, BY_ONE_PLUS_WEIGHTS };

typedef struct {
    const float *x, *weights; /* [rows, width] and [width] */
    float *y;                 /* as x, a row a block */
    int64 rows, width;
    int how;
    float share, eps;
} Norm;

DEVICE float square(const Norm *a, int64 i) {
    const float number = a->x[blockIdx.x * a->width + i];
    return number * number;
}

KERNEL(flowspec_norm, Norm) {
    const int64 half = half_room(a.width);
    if (half == 0)
        room[0] = square(&a, 0);
    IN_BLOCK(i, half) room[i] = square(&a, i) + (i + half < a.width ? square(&a, i + half) : 0.0f);
    const float mean = folded(half) * a.share + a.eps;
    const float factor = 1.0f / (float)sqrt((double)mean);
    IN_BLOCK(i, a.width) {
        const int64 at = blockIdx.x * a.width + i;
        a.y[at] = a.x[at] * factor * (a.how == BY_WEIGHTS ? a.weights[i] : 1.0f + a.weights[i]);
    }
}

typedef struct {
    const float *x; /* rows of `width`, each a block's */
    float *y;
    int64 width;
    int are_powers;
} Shares;

/* The greatest of a block's numbers, or what is no number if there is one; a thread knows that of its own. */
DEVICE float greatest_of_block(float own) {
    SYNC;
    room[threadIdx.x] = own;
    SYNC;
    float most = room[0];
    for (int i = 1; i < blockDim.x; i++)
        most = room[i] > most || room[i] != room[i] ? room[i] : most;
    SYNC;
    return most;
}

KERNEL(flowspec_shares, Shares) {
    const int64 half = half_room(a.width);
    const float *x = a.x + blockIdx.x * a.width;
    float *y = a.y + blockIdx.x * a.width, most = LEAST;
    IN_BLOCK(i, a.width) most = x[i] > most || x[i] != x[i] ? x[i] : most;
    most = greatest_of_block(most);
    IN_BLOCK(i, a.width) y[i] = a.are_powers ? exponential(x[i] - most) : x[i];
    SYNC;
    if (half == 0)
        room[0] = y[0];
    IN_BLOCK(i, half) room[i] = y[i] + (i + half < a.width ? y[i + half] : 0.0f);
    const float sum = folded(half);
    IN_BLOCK(i, a.width) y[i] = y[i] / sum;
}

typedef struct {
    const float *x, *w; /* [rows, in] and [out, in] */
    float *y;           /* [rows, out], each a block's */
    int64 in, out;
} Halves;

KERNEL(flowspec_halves, Halves) {
    const int64 half = half_room(a.in);
    const float *x = a.x + blockIdx.x / a.out * a.in, *w = a.w + blockIdx.x % a.out * a.in;
    if (half == 0)
        room[0] = x[0] * w[0];
    IN_BLOCK(i, half) room[i] = x[i] * w[i] + (i + half < a.in ? x[i + half] * w[i + half] : 0.0f);
    const float found = folded(half);
    if (threadIdx.x == 0)
        a.y[blockIdx.x] = found;
}

/* -------------------------------------------------------------------------------------------- attention */

typedef struct {
    const float *x;             /* numbers lie beside each other, rows and heads as far apart as is said */
    const float *cosine, *sine; /* [rows, turned] */
    float *y;                   /* [rows, heads, width] */
    int64 rows, heads, width, turned, between_rows, between_heads;
} Turn;

KERNEL(flowspec_turn, Turn) {
    FOR_ALL(i, a.rows * a.heads * a.width) {
        const int64 place = i % a.width, head = i / a.width % a.heads, row = i / a.width / a.heads;
        const int64 from = row * a.between_rows + head * a.between_heads, half = a.turned / 2;
        const float own = a.x[from + place];
        if (place >= a.turned) {
            a.y[i] = own;
            continue;
        }
        const float other = a.x[from + (place < half ? place + half : place - half)];
        const int64 angle = row * a.turned + place;
        a.y[i] = own * a.cosine[angle] + (place < half ? -other : other) * a.sine[angle];
    }
}

typedef struct {
    const float *keys, *values; /* numbers lie beside each other, rows and heads as far apart as is said */
    const int64 *places;        /* [rows] */
    void *to_keys, *to_values; /* [kv_heads, slots / 16, width, 16], [kv_heads, slots, value_width] */
    void *key_steps, *value_steps; /* of levels, which are not stored here */
    int64 rows, kv_heads, width, value_width, slots;
    int64 between_keys, between_key_heads, between_values, between_value_heads;
    int cache_kind;
} Stored;

KERNEL(flowspec_store, Stored) {
    FOR_ALL(i, a.kv_heads * a.rows * a.width) {
        const int64 number = i % a.width, row = i / a.width % a.rows, head = i / a.width / a.rows;
        const int64 slot = a.places[row], lane = slot % LANES;
        const int64 block = head * (a.slots / LANES) + slot / LANES;
        const int64 key = row * a.between_keys + head * a.between_key_heads + number;
        const int64 value = row * a.between_values + head * a.between_value_heads + number;
        narrow(a.to_keys, (block * a.width + number) * LANES + lane, a.cache_kind, a.keys[key]);
        narrow(a.to_values, (head * a.slots + slot) * a.value_width + number, a.cache_kind, a.values[value]);
    }
}

typedef struct {
    const float *queries;     /* [rows, heads, width] */
    const void *keys, *values; /* as in `Stored`, of `cache_kind` */
    const int64 *paths;       /* [rows, positions]: slots, -1 where a row sees none */
    const float *sinks;       /* [heads] or NULL */
    float *shares;            /* [rows, heads, positions], in which scores are first */
    float *weights;           /* [rows, heads] */
    float *sums;              /* [rows, heads, blocks of positions, width] */
    float *found;             /* as queries */
    int64 rows, heads, kv_heads, width, value_width, slots, positions;
    int cache_kind;
    float scale, cap, cap_inverse;
} Attention;

KERNEL(flowspec_scores, Attention) {
    FOR_ALL(i, a.rows * a.heads * a.positions) {
        const int64 position = i % a.positions, of = i / a.positions, head = of % a.heads, row = of / a.heads;
        const int64 slot = a.paths[row * a.positions + position], query = (row * a.heads + head) * a.width;
        if (slot < 0)
            continue;
        const int64 block = head / (a.heads / a.kv_heads) * (a.slots / LANES) + slot / LANES;
        const int64 key = block * a.width * LANES + slot % LANES;
        float score = 0.0f;
        for (int64 n = 0; n < a.width; n++)
            score += a.queries[query + n] * widened(a.keys, key + n * LANES, a.cache_kind);
        score *= a.scale;
        a.shares[i] = a.cap != 0.0f ? hyperbolic(score * a.cap_inverse) * a.cap : score;
    }
}

/* Of a row's head, a block's, what each position counts, and all together: block by block of positions. */
KERNEL(flowspec_weigh, Attention) {
    const int64 row = blockIdx.x / a.heads, blocks = (a.positions + BLOCK - 1) / BLOCK;
    const int64 *paths = a.paths + row * a.positions;
    float *shares = a.shares + blockIdx.x * a.positions, most = LEAST;
    IN_BLOCK(p, a.positions)
    if (paths[p] >= 0)
        most = shares[p] > most || shares[p] != shares[p] ? shares[p] : most;
    most = greatest_of_block(most);
    const float sink = a.sinks ? a.sinks[blockIdx.x % a.heads] : 0.0f;
    if (a.sinks)
        most = most != most || most > sink ? most : sink;
    IN_BLOCK(p, a.positions) shares[p] = paths[p] >= 0 ? exponential(shares[p] - most) : 0.0f;
    SYNC;
    IN_BLOCK(b, blocks) {
        float sum = 0.0f;
        for (int64 p = b * BLOCK; p < (b + 1) * BLOCK && p < a.positions; p++)
            sum += shares[p];
        room[b] = sum;
    }
    SYNC;
    if (threadIdx.x == 0) {
        float total = 0.0f;
        for (int64 b = 0; b < blocks; b++)
            total += room[b];
        a.weights[blockIdx.x] = a.sinks ? total + exponential(sink - most) : total;
    }
}

/* Of each block of positions what its values come to, and then of all blocks. */
KERNEL(flowspec_sums, Attention) {
    const int64 blocks = (a.positions + BLOCK - 1) / BLOCK;
    FOR_ALL(i, a.rows * a.heads * blocks * a.width) {
        const int64 number = i % a.width, begin = i / a.width % blocks * BLOCK, of = i / a.width / blocks;
        const int64 head = of % a.heads / (a.heads / a.kv_heads);
        const int64 *paths = a.paths + of / a.heads * a.positions;
        const int64 value = head * a.slots * a.value_width + number;
        const float *shares = a.shares + of * a.positions;
        float sum = 0.0f;
        for (int64 p = begin; p < begin + BLOCK && p < a.positions; p++)
            if (paths[p] >= 0)
                sum += shares[p] * widened(a.values, value + paths[p] * a.value_width, a.cache_kind);
        a.sums[i] = sum;
    }
}

KERNEL(flowspec_values, Attention) {
    const int64 blocks = (a.positions + BLOCK - 1) / BLOCK;
    FOR_ALL(i, a.rows * a.heads * a.width) {
        const int64 number = i % a.width, of = i / a.width;
        float total = 0.0f;
        for (int64 b = 0; b < blocks; b++)
            total += a.sums[(of * blocks + b) * a.width + number];
        a.found[i] = total / a.weights[of];
    }
}
